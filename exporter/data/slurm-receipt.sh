#!/bin/sh
# Slurm epilog: writes a job's short report into its accounting record (sacct) or into its working directory.
# Optional; install it on each GPU node, in addition to the scripts named in slurm-prolog.sh, as
#     /etc/slurm/epilog.d/60-gpu-efficiency-receipt.sh
# Needs a POSIX shell, coreutils and util-linux, gpu-efficiency, and sacct and sacctmgr for the accounting record.
#
# Configure it in /etc/gpu-efficiency/receipts.conf, a shell file that must belong to root; the defaults are below.
# Only the first node of a job writes. The accounting record is read twice and changed once per job, through slurmdbd,
# because slurmctld does not accept a comment for a job that is ending. Comments by others are not replaced.
#
# It does not block slurmd: it continues in its own session (with PrologFlags=RunInJob as a service of systemd), and the
# epilog itself ends at once, always with exit 0. So it neither drains the node nor delays the node's next job. Errors
# are written to syslog.

# shellcheck disable=SC2317  # what `locked` calls is reached

# Settings of receipts.conf.
places=admin_comment                  # any of admin_comment, comment and file, separated by spaces, or none
append=no                             # yes: append to a comment by others
command=/opt/gpu-efficiency/bin/gpu-efficiency
config=/etc/gpu-efficiency/config.toml
flags=                                # of `report`: "--prometheus http://prometheus:9090" includes all nodes
wait=                                 # seconds to wait at most until the end of the job is seen: 15 if the node's daemon
                                      # is asked; with --prometheus it always sleeps that long, by default 150, for two
                                      # scrapes a minute apart
limit=60                              # seconds for any single step
mark='gpu-efficiency: '               # beginning of comments by this script
PATH=/usr/sbin:/usr/bin:/sbin:/bin    # where Slurm's commands are

# Not named GPU_EFFICIENCY_...: the command would take such a variable for an unknown setting.
conf=${RECEIPT_CONF:-/etc/gpu-efficiency/receipts.conf}
longest=1000                          # maximum bytes of a comment
umask 077
trap 'exit 0' EXIT
cd / || exit 0                        # the current directory may be on a file system that hangs

# Removes control characters, because messages may contain names that a user has chosen.
tell() {
    told=$(printf '%s' "$1" | tr '\000-\037\177' ' ')
    printf 'gpu-efficiency receipt: %s\n' "$told" >&2
    if command -v logger >/dev/null 2>&1; then
        logger -t gpu-efficiency-receipt -p "daemon.${2:-warning}" -- "$told" >/dev/null 2>&1
    fi
    return 0
}

# True if $1 is a number of at most 18 digits.
number() {
    case $1 in
        '' | *[!0-9]* | 0?* | ???????????????????*) return 1 ;;
    esac
    return 0
}

# True on the first node of the allocation. scontrol expands the node list without a request to the controller.
first_node() {
    list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
    if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || [ -z "$list" ]; then
        return 0
    fi
    first=$(timeout 5 scontrol show hostnames "$list" 2>/dev/null | head -n 1)
    [ -z "$first" ] || [ "$first" = "${SLURMD_NODENAME:-}" ]
}

# Prints which part of the job the report covers, if the job has several nodes and only this node's store is used.
part() {
    if [ -z "$flags" ] && [ "${SLURM_JOB_NUM_NODES:-1}" != 1 ]; then
        printf 'part of node %s, one of %s' "${SLURMD_NODENAME:-}" "$SLURM_JOB_NUM_NODES"
    fi
}

# Prints the report in the form given by the arguments; false if there is none.
receipt() {
    if [ -f "$config" ]; then
        set -- --config "$config" "$@"
    fi
    # shellcheck disable=SC2086  # flags are words
    nice -n 19 timeout -k 5 "$((limit + wait))" "$command" report "$job" $flags "$@" </dev/null
}

# Prints the id that squeue and sacct show, such as 6_1 in an array and 7+0 in a heterogeneous job: the report $1 begins
# with it. slurmd passes neither the task's number nor the offset to an epilog (22.05 to 26.05).
shown_id() {
    shown=${1#job }
    shown=${shown%%: *}
    case $shown in
        '' | *[!0-9_+]*) shown=$job ;;
    esac
    printf '%s' "$shown"
}

# -- accounting record --

# Prints its input as one line without control characters, cut to $longest bytes but not within a character.
one_line() {
    if command -v iconv >/dev/null 2>&1; then
        tr -s '\000-\037\177' ' ' | head -c "$longest" | iconv -c -f UTF-8 -t UTF-8 2>/dev/null
    else
        tr -s '\000-\037\177' ' ' | tr -cd '\040-\176' | head -c "$longest"
    fi
    return 0
}

# Prints the comment $1 with our part replaced by $2; false if it must not be changed.
written() {
    case $1 in
        '' | '(null)' | "$mark"*) printf '%s' "$2" ;;
        *"| $mark"*) printf '%s' "${1%%"| $mark"*}| $2" ;;
        *) [ "$append" = yes ] && printf '%s' "$1 | $2" ;;
    esac
}

# Sets field $1 of the job's record to line $2. An array task is addressed as ARRAY_TASK: the raw id of the last task is
# the array's own id, which would change all tasks.
comment() {
    said=$(timeout -k 5 "$limit" sacct -X -n -P -j "$job" --format=JobIDRaw,JobID 2>&1)
    id=$(printf '%s\n' "$said" | grep "^$job|" | tail -n 1)
    id=${id#*|}
    case $id in
        '' | *[!0-9_+]*)
            tell "job $job: no record to write into: $(printf '%s' "$said" | head -n 1)"
            return 0
            ;;
    esac
    # Apart from the ids: a comment is the user's, and may have lines that look like another job's record.
    if ! was=$(timeout -k 5 "$limit" sacct -X -n -P -j "$id" --format="$1" 2>&1); then
        tell "job $job: its $1 cannot be read: $(printf '%s' "$was" | head -n 1)"
        return 0
    fi
    if ! whole=$(written "$(printf '%s' "$was" | tr '\000-\037\177' ' ')" "$2"); then
        tell "job $job: its $1 is somebody else's and is left alone" info
        return 0
    fi
    if ! said=$(timeout -k 5 "$limit" sacctmgr -i modify job where "jobid=$id" set "$1=$whole" 2>&1); then
        tell "job $job: sacctmgr: $said"
    fi
}

# -- job's working directory --

# Runs as the job's user, with nothing but a shell and the text. The file is created under a random name and then
# renamed, so that it is replaced atomically, and a symbolic link of that name is replaced instead of followed.
# shellcheck disable=SC2016  # expanded by that shell
in_folder='
cd -- "$1" || exit 1
new=$(mktemp "./.$2.XXXXXXXX") || exit 1
if cat >"$new" && mv -fT -- "$new" "$2"; then exit 0; fi
rm -f -- "$new"
exit 1'

as_user() {
    timeout -k 5 "$limit" env -i PATH=/usr/bin:/bin LC_ALL=C \
        setpriv --reuid "$uid" --regid "$gid" "$1" --no-new-privs sh -c "$in_folder" sh \
        "$folder" "slurm-$name.gpu-efficiency.txt"
}

file() {
    uid=${SLURM_JOB_UID:-} gid=${SLURM_JOB_GID:-} folder=${SLURM_JOB_WORK_DIR:-}
    if ! number "$uid" || ! number "$gid" || [ -z "$folder" ]; then
        tell "job $job: slurmd says neither whose it is nor its folder (22.05 and later do): no file"
    elif [ "$uid" = 0 ]; then
        tell "job $job: it is root's, and root writes into no folder of a job: no file" info
    else
        groups=--clear-groups
        if getent passwd "$uid" >/dev/null 2>&1; then groups=--init-groups; fi
        said=$(printf '%s\n' "$1" | as_user "$groups" 2>&1) || tell "job $job: no file in $folder: $said"
    fi
}

# -- main --

# True if a Prometheus is asked: it has no daemon to wait for, but further scrapes.
scraped() {
    case " $flags" in
        *' --prometheus'*) return 0 ;;
    esac
    return 1
}

write() {
    if scraped; then
        set --
    else
        set -- --wait "$wait"
    fi
    # Its errors, then the line, so that it runs once.
    if ! said=$(
        { line=$(receipt --line "$@"); } 2>&1
        status=$?
        printf '\n%s' "$line"
        [ "$status" = 0 ]
    ); then
        # As a rule a job without GPUs.
        tell "job $job: no receipt: $(printf '%s' "$said" | grep . | head -n 1)" info
        return 0
    fi
    line=$(printf '%s' "$said" | tail -n 1)
    part=$(part) name=$(shown_id "$line")
    for place in $places; do
        case $place in
            comment) comment Comment "$(printf '%s' "$mark$line${part:+ ($part)}" | one_line)" ;;
            admin_comment) comment AdminComment "$(printf '%s' "$mark$line${part:+ ($part)}" | one_line)" ;;
            file)
                if text=$(receipt --short 2>/dev/null); then
                    hint="${part:+
This is the $part; each of the others shows its own: gpu-efficiency report $name}"
                    case $text in
                        *', on a login node: '*) hint="${part:+
This is the $part.}" ;;
                    esac
                    file "$text$hint"
                fi
                ;;
            none) ;;
            *) tell "$conf: places: there is no $place; it is of admin_comment, comment, file and none" ;;
        esac
    done
}

# Limits a node to four at a time, because hundreds of short jobs may end together. The directory belongs to root.
locked() {
    locks=${RECEIPT_LOCKS:-/run/gpu-efficiency-receipts}
    if mkdir -p "$locks" 2>/dev/null; then
        (
            if ! flock -w "$limit" 9; then
                tell "job $job: no receipt: those of other jobs have taken longer than $limit s"
                exit 0
            fi
            "$@" 9>&-
        ) 9>"$locks/$((job % 4))"
    else
        "$@"
    fi
}

# With PrologFlags=RunInJob (24.11 and later) an epilog is in the control group of its job, with which it is killed.
in_job() {
    grep -Eq '/[^/]*slurm[^/]*/(.*/)?(job_[0-9]+|s[0-9A-Z]{13})(/|$)' "${RECEIPT_CGROUP:-/proc/self/cgroup}" 2>/dev/null
}

# Starts this script again as a service of its own, outside of the job's group; false without systemd.
as_service() {
    command -v systemd-run >/dev/null 2>&1 || return 1
    set --
    for name in SLURM_JOB_ID SLURM_JOB_UID SLURM_JOB_GID SLURM_JOB_WORK_DIR SLURM_JOB_NODELIST SLURM_NODELIST \
        SLURM_JOB_NUM_NODES SLURMD_NODENAME SLURM_CONF RECEIPT_CONF RECEIPT_LOCKS; do
        eval "value=\${$name:-}"
        if [ -n "$value" ]; then set -- "$@" "--setenv=$name=$value"; fi
    done
    timeout -k 5 "$limit" systemd-run --quiet --collect --no-block "$@" /bin/sh "$script" detached >/dev/null 2>&1
}

script=$0
job=${SLURM_JOB_ID:-}
if [ -f "$conf" ]; then
    # shellcheck disable=SC1090  # the operator's file
    . "$conf"
fi
export PATH
if ! number "$job"; then
    tell "SLURM_JOB_ID is no number: '$job'"
elif [ "${1:-}" = detached ]; then
    exec >/dev/null
    if first_node; then
        if scraped; then
            sleep "${wait:=150}"
            wait=0                    # no command is given more time for it
        fi
        : "${wait:=15}"
        locked write
    fi
elif [ "$places" != none ] && ! { in_job && as_service; }; then
    # slurmd kills the epilog's process group when the epilog ends. The substitution ends once the detached process has
    # closed its output, and by then it has left that group.
    if ! said=$(setsid -f /bin/sh "$script" detached </dev/null 2>/dev/null); then
        tell "job $job: setsid cannot start what writes it: $said"
    fi
fi
exit 0
