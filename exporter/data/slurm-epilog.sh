#!/bin/sh
# Slurm epilog: removes a job from the files that the prolog wrote; slurm-prolog.sh describes how to install both.
# It checks all files, because not every Slurm version passes the job's GPUs to an epilog.
#
# It always exits 0: an epilog that fails drains the node (Slurm, Prolog and Epilog Guide). Errors are written to
# standard error and to syslog.

# shellcheck disable=SC2317  # what `locked` calls is reached

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022
trap 'exit 0' EXIT
dir=${GPU_EFFICIENCY_JOBS_DIR:-/run/gpu-efficiency/jobs}
job=${SLURM_JOB_ID:-}

tell() {
    printf 'gpu-efficiency epilog: %s\n' "$1" >&2
    if command -v logger >/dev/null 2>&1; then
        logger -t gpu-efficiency-epilog -p daemon.warning -- "$1" >/dev/null 2>&1
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

# True if file $1 has a line of this job.
holds() {
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
            "$job" | "$job "*) return 0 ;;
        esac
    done <"$1"
    return 1
}

# Prints the lines of file $1 that are not this job's.
others() {
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
            "$job" | "$job "*) ;;
            ?*) printf '%s\n' "$line" ;;
        esac
    done <"$1"
}

# Replaces the file atomically; a file without jobs is removed.
remove() {
    new=$dir/.${1##*/}.$$
    if others "$1" >"$new"; then
        if [ -s "$new" ]; then
            mv -f "$new" "$1" && return 0
        else
            rm -f "$1" "$new" && return 0
        fi
    fi
    rm -f "$new"
    tell "job $job: cannot take it out of $1: its GPU will look held by it"
}

remove_all() {
    for file in "$dir"/*; do
        case ${file##*/} in
            *[!0-9.]*) continue ;; # not written by the prolog
        esac
        if [ -f "$file" ] && holds "$file"; then
            remove "$file"
        fi
    done
}

# As in the prolog: serialized, but waits for at most 5 s.
locked() {
    if command -v flock >/dev/null 2>&1; then
        (
            flock -w 5 9 || tell "job $job: no lock on $dir after 5 s, going on without"
            "$@"
        ) 9<"$dir"
        return 0
    fi
    tries=0
    until mkdir "$dir/.lock" 2>/dev/null; do
        tries=$((tries + 1))
        if [ "$tries" -ge 50 ] || [ ! -w "$dir" ]; then
            break
        fi
        sleep 0.1
    done
    "$@"
    rmdir "$dir/.lock" 2>/dev/null
    return 0
}

if [ ! -d "$dir" ]; then
    exit 0 # no job has had a GPU of this node
fi
if ! number "$job"; then
    tell "SLURM_JOB_ID is no number: '$job'"
    exit 0
fi
locked remove_all
exit 0
