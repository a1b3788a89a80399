#!/bin/sh
# Slurm prolog: records the jobs that hold each GPU: one file per GPU, named by its index, one job id per line.
# gpu-efficiency reads these files (scheduler "slurm" with slurm.mapping_dir, or "mapping-dir"), and so does
# dcgm-exporter (--hpc-job-mapping-dir). Needs a POSIX shell and coreutils; uses flock of util-linux if installed.
#
# Not needed where slurm.conf has PrologFlags=Contain (docs/bare-metal.md).
#
# Install on each GPU node, with its epilog, and in slurm.conf:
#     PrologFlags=Alloc
#     Prolog=/etc/slurm/prolog.d/*
#     Epilog=/etc/slurm/epilog.d/*
# as /etc/slurm/prolog.d/50-gpu-efficiency.sh and likewise for the epilog, or call it from your own prolog. Install both
# on nodes without GPUs too: slurmd drains a node where no file matches, also after an uninstallation. Without
# PrologFlags=Alloc it runs only with the first step, so that an allocation without steps is not recorded.
# slurmd sets the environment of a prolog: for another directory change the line below, in both scripts, or call them
# from a script that sets GPU_EFFICIENCY_JOBS_DIR.
#
# The indexes are those in SLURM_JOB_GPUS, Slurm's numbers of the devices in gres.conf. They equal the driver's if
# gres.conf lists all GPUs of the node in the driver's order (AutoDetect=nvml does). With MIG they number instances: do
# not use this script there.
#
# It always exits 0: a prolog that fails drains the node and requeues the job (Slurm, Prolog and Epilog Guide).
# Errors are written to standard error and to syslog; the job starts nevertheless.

# shellcheck disable=SC2317  # what `locked` calls is reached

PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022
trap 'exit 0' EXIT
dir=${GPU_EFFICIENCY_JOBS_DIR:-/run/gpu-efficiency/jobs}
job=${SLURM_JOB_ID:-}

tell() {
    printf 'gpu-efficiency prolog: %s\n' "$1" >&2
    if command -v logger >/dev/null 2>&1; then
        logger -t gpu-efficiency-prolog -p daemon.warning -- "$1" >/dev/null 2>&1
    fi
    return 0
}

# True if $1 is a number of at most 18 digits without a leading 0: safe in shell arithmetic, and not a path.
number() {
    case $1 in
        '' | *[!0-9]* | 0?* | ???????????????????*) return 1 ;;
    esac
    return 0
}

# Prints the numbers of a list such as 0,1,4-6, one per line. Slurm writes ranges elsewhere, though not here today.
numbers() {
    printf '%s\n' "$1" | tr ',' '\n' | while IFS= read -r part; do
        first=${part%%-*}
        last=${part#*-}
        if ! number "$first" || ! number "$last" || [ "$last" -gt 1023 ]; then
            tell "job $job: SLURM_JOB_GPUS is no list of numbers below 1024, left out: $part"
            continue
        fi
        while [ "$first" -le "$last" ]; do
            printf '%s\n' "$first"
            first=$((first + 1))
        done
    done
}

# Prints the lines of file $1 that are not this job's.
others() {
    [ -f "$1" ] || return 0
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
            "$job" | "$job "*) ;;
            ?*) printf '%s\n' "$line" ;;
        esac
    done <"$1"
}

# Replaces the file atomically: it is written under a temporary name, which is no GPU's, and then renamed.
add() {
    new=$dir/.$1.$$
    if [ ! -d "$dir/$1" ] && { others "$dir/$1" && printf '%s\n' "$job"; } >"$new" && mv -f "$new" "$dir/$1"; then
        return 0
    fi
    rm -f "$new"
    tell "job $job: cannot write $dir/$1: its GPU will look unallocated"
}

add_all() {
    numbers "$SLURM_JOB_GPUS" | while IFS= read -r gpu; do
        add "$gpu"
    done
}

# Serializes prologs and epilogs of concurrent jobs, which rewrite whole files. The kernel releases flock's lock if its
# holder dies, but a directory used as a lock stays. So the wait is at most 5 s, after which that directory is removed:
# slurmd considers a job lost after BatchStartTimeout, 10 s by default.
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

if [ -z "${SLURM_JOB_GPUS:-}" ]; then
    exit 0 # a job without GPUs
fi
if ! number "$job"; then
    tell "SLURM_JOB_ID is no number: '$job'"
    exit 0
fi
if ! mkdir -p "$dir" 2>/dev/null || [ ! -d "$dir" ]; then
    tell "job $job: cannot make $dir: its GPUs will look unallocated"
    exit 0
fi
locked add_all
exit 0
