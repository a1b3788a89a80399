#!/bin/sh
# Slurm epilog: writes a job's short receipt where its user looks, into the accounting record (sacct) or the job's folder.
# Nothing is written unless this is installed, on each GPU node, beside what slurm-prolog.sh names:
#     /etc/slurm/epilog.d/60-gpu-efficiency-receipt.sh
# Needs a POSIX shell, coreutils and util-linux, gpu-efficiency, and sacct and sacctmgr for the record.
#
# What it does is set in /etc/gpu-efficiency/receipts.conf, which is shell and belongs to root; below are the defaults.
# The first node of a job writes, and no other; the record is asked for once and changed once a job, by slurmdbd, for
# slurmctld takes no comment for a job that is ending. A comment of somebody else's is left alone.
#
# slurmd waits for none of it: this goes on in a session of its own and the epilog is over at once, with exit 0, whatever
# happens. A node is not drained by it, and is not kept from its next job. What goes wrong is told to syslog.

# shellcheck disable=SC2317  # what `locked` calls is reached

# What receipts.conf may set.
places=admin_comment                  # of admin_comment, comment and file, as many as are wanted, or none
append=no                             # yes: after what somebody else has written into that comment
command=/opt/gpu-efficiency/bin/gpu-efficiency
config=/etc/gpu-efficiency/config.toml
flags=                                # for `report`: "--prometheus http://prometheus:9090" has every node's part
wait=15                               # seconds in which the node's daemon may learn that the job has ended
limit=60                              # seconds that any one step may take
mark='gpu-efficiency: '               # what a comment of ours begins with
PATH=/usr/sbin:/usr/bin:/sbin:/bin    # where Slurm's commands are

# Not GPU_EFFICIENCY_...: such a variable would be the command's, too, and no setting of it.
conf=${RECEIPT_CONF:-/etc/gpu-efficiency/receipts.conf}
longest=1000                          # bytes of a comment
umask 077
trap 'exit 0' EXIT
cd / || exit 0                        # the folder that slurmd left us in may be on a file system that hangs

# A name of the user's is in some of it: one line it stays.
tell() {
    told=$(printf '%s' "$1" | tr '\000-\037\177' ' ')
    printf 'gpu-efficiency receipt: %s\n' "$told" >&2
    if command -v logger >/dev/null 2>&1; then
        logger -t gpu-efficiency-receipt -p "daemon.${2:-warning}" -- "$told" >/dev/null 2>&1
    fi
    return 0
}

# True when $1 is a number of at most 18 digits.
number() {
    case $1 in
        '' | *[!0-9]* | 0?* | ???????????????????*) return 1 ;;
    esac
    return 0
}

# Only the first node of the allocation writes. Slurm's own words are expanded here, without a call to the controller.
first_node() {
    list=${SLURM_JOB_NODELIST:-${SLURM_NODELIST:-}}
    if [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || [ -z "$list" ]; then
        return 0
    fi
    first=$(timeout 5 scontrol show hostnames "$list" 2>/dev/null | head -n 1)
    [ -z "$first" ] || [ "$first" = "${SLURMD_NODENAME:-}" ]
}

# Where there are several nodes and this one's store is all that was asked: whose part it is.
part() {
    if [ -z "$flags" ] && [ "${SLURM_JOB_NUM_NODES:-1}" != 1 ]; then
        printf 'part of node %s, one of %s' "${SLURMD_NODENAME:-}" "$SLURM_JOB_NUM_NODES"
    fi
}

# The receipt in the form that is named by the further words; false where there is none.
receipt() {
    if [ -f "$config" ]; then
        set -- --config "$config" "$@"
    fi
    # shellcheck disable=SC2086  # flags are words
    nice -n 19 timeout -k 5 "$((limit + wait))" "$command" report "$job" $flags "$@" </dev/null 2>/dev/null
}

# -- into the accounting record --

# One line without control characters, of so many bytes at most, never the half of a character.
one_line() {
    if command -v iconv >/dev/null 2>&1; then
        tr -s '\000-\037\177' ' ' | head -c "$longest" | iconv -c -f UTF-8 -t UTF-8 2>/dev/null
    else
        tr -s '\000-\037\177' ' ' | tr -cd '\040-\176' | head -c "$longest"
    fi
    return 0
}

# What a comment says once $2 is written over $1; false where it must not be.
written() {
    case $1 in
        '' | '(null)' | "$mark"*) printf '%s' "$2" ;;
        *"| $mark"*) printf '%s' "${1%%"| $mark"*}| $2" ;;
        *) [ "$append" = yes ] && printf '%s' "$1 | $2" ;;
    esac
}

# Field $1 of the job's record becomes line $2. A task of an array is named by the array and its number: for the task that
# has the array's own number (the last one) that number alone would change them all.
comment() {
    said=$(timeout -k 5 "$limit" sacct -X -n -P -j "$job" --format="JobIDRaw,JobID,$1" 2>&1)
    row=$(printf '%s\n' "$said" | grep "^$job|" | tail -n 1)
    if [ -z "$row" ]; then
        tell "job $job: no record to write into: $(printf '%s' "$said" | head -n 1)"
        return 0
    fi
    row=${row#*|}
    if ! whole=$(written "${row#*|}" "$2"); then
        tell "job $job: its $1 is somebody else's and is left alone" info
        return 0
    fi
    if ! said=$(timeout -k 5 "$limit" sacctmgr -i modify job where "jobid=${row%%|*}" set "$1=$whole" 2>&1); then
        tell "job $job: sacctmgr: $said"
    fi
}

# -- into the job's folder --

# Run as the job's user, who is given no more than a shell and the text: the file is made under a name that is nobody's
# and then renamed, so that a link that somebody has put there is replaced and never followed, and there is no half of one.
# shellcheck disable=SC2016  # it is that shell's to expand
in_folder='
cd -- "$1" || exit 1
new=$(mktemp "./.$2.XXXXXXXX") || exit 1
if cat >"$new" && mv -fT -- "$new" "$2"; then exit 0; fi
rm -f -- "$new"
exit 1'

as_user() {
    timeout -k 5 "$limit" env -i PATH=/usr/bin:/bin LC_ALL=C \
        setpriv --reuid "$uid" --regid "$gid" "$1" --no-new-privs sh -c "$in_folder" sh \
        "$folder" "slurm-$job.gpu-efficiency.txt"
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

# -- the two halves --

write() {
    if [ -n "$flags" ]; then
        sleep "$wait" # for the last scrape
    fi
    if ! line=$(receipt --line --wait "$wait"); then
        # As a rule a job without GPUs.
        tell "job $job: no receipt: \`$command report $job\` says why" info
        return 0
    fi
    part=$(part)
    for place in $places; do
        case $place in
            comment) comment Comment "$(printf '%s' "$mark$line${part:+ ($part)}" | one_line)" ;;
            admin_comment) comment AdminComment "$(printf '%s' "$mark$line${part:+ ($part)}" | one_line)" ;;
            file)
                if text=$(receipt --short); then
                    hint="${part:+
This is the $part. All nodes: gpu-efficiency report $job --prometheus URL}"
                    file "$text$hint"
                fi
                ;;
            none) ;;
            *) tell "$conf: places: there is no $place; it is of admin_comment, comment, file and none" ;;
        esac
    done
}

# No more than four at a time on a node, for jobs of a second each may end by the hundred. The folder is root's alone.
locked() {
    locks=${RECEIPT_LOCKS:-/run/gpu-efficiency-receipts}
    if mkdir -p "$locks" 2>/dev/null; then
        (
            flock -w "$limit" 9 || exit 0
            "$@" 9>&-
        ) 9>"$locks/$((job % 4))"
    else
        "$@"
    fi
}

job=${SLURM_JOB_ID:-}
if [ -f "$conf" ]; then
    # shellcheck disable=SC1090  # it is the operator's
    . "$conf"
fi
export PATH
if ! number "$job"; then
    tell "SLURM_JOB_ID is no number: '$job'"
elif [ "${1:-}" = detached ]; then
    exec >/dev/null
    if first_node; then locked write; fi
elif [ "$places" != none ]; then
    # slurmd kills the epilog's process group when the epilog is over. The substitution ends when the other has closed its
    # output: by then it has left that group.
    if ! said=$(setsid -f /bin/sh "$0" detached </dev/null 2>/dev/null); then
        tell "job $job: setsid cannot start what writes it: $said"
    fi
fi
exit 0
