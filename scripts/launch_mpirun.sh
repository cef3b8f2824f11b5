#!/usr/bin/env bash
# Starts ranks on one host or many with Open MPI's mpirun, and lets them save when they are asked to stop.
#
# usage: scripts/launch_mpirun.sh [flags] [--] COMMAND [ARGUMENT...]
#   --ranks N       ranks in all (default: hosts x --per-host)
#   --hosts FILE    a host name a line, # starts a comment; its further words (slots=8) are not used. Without it: this host
#   --per-host N    ranks on every host: those of a host are neighbours, as --tp wants it
#   --grace S       seconds from the wish to stop to killing (default 600): a step and a checkpoint must fit in
#   --print         show the command, and the host list that it reads, and start nothing
#
#   scripts/launch_mpirun.sh --ranks 4 ./train_gpt --config scripts/recipes/kjv.cfg --out runs/kjv
#   scripts/launch_mpirun.sh --hosts hosts.txt --per-host 8 -- scripts/recipes/train_70b.sh
#
# Stopping. mpirun kills its ranks about a second after it gets SIGTERM, long before a checkpoint is written; SIGUSR1 it passes on, and train_gpt
# saves and exits with 7 on either. So SIGTERM, SIGUSR1 and ctrl-C to this script become SIGUSR1; --grace seconds later, or at a second ctrl-C, mpirun
# gets SIGTERM, and 10 seconds later SIGKILL. Its exit code is this script's: 7 is "stopped, saved", to be continued with --resume auto.
#
# On every host the repository, the program and the data have the same paths. Environment that ranks elsewhere get: TRAIN, VAL, OUT and what starts with
# OMP_ or TRAIN_GPT_ (OMPI_ goes by itself). Ranks are not bound to cores: each starts its own threads, cores / ranks of the host unless
# OMP_NUM_THREADS says otherwise. As root, Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
set -euo pipefail

stop() {
    echo "launch_mpirun.sh: $1" >&2
    exit 2
}
# number FLAG VALUE
number() { [[ "$2" =~ ^[1-9][0-9]{0,6}$ ]] || stop "$1: got '$2', wanted a whole number from 1"; }

hosts='' per_host='' ranks='' grace=600 print=no
while [ $# -gt 0 ]; do
    case $1 in
    --ranks | --hosts | --per-host | --grace)
        [ $# -ge 2 ] || stop "$1: got nothing, wanted a value"
        case $1 in
        --ranks) number "$1" "$2" && ranks=$2 ;;
        --hosts) hosts=$2 ;;
        --per-host) number "$1" "$2" && per_host=$2 ;;
        --grace) number "$1" "$2" && grace=$2 ;;
        esac
        shift 2
        ;;
    --print) print=yes && shift ;;
    --help)
        sed -n '2,/^set -euo/{/^set/d;s/^# \{0,1\}//;p}' "$0"
        exit 0
        ;;
    --)
        shift
        break
        ;;
    --*) stop "unknown flag '$1' (--help shows them; -- ends them)" ;;
    *) break ;;
    esac
done
[ $# -gt 0 ] || stop "got no command to start (--help)"
command -v mpirun >/dev/null || stop "mpirun is missing (Debian: apt-get install openmpi-bin)"
version=$(mpirun --version 2>/dev/null | head -n 1)
case $version in
*"Open MPI"* | *OpenRTE*) ;;
*) stop "mpirun is '$version', wanted Open MPI's" ;;
esac

list=''
names=(localhost)
if [ -n "$hosts" ]; then
    if [ ! -f "$hosts" ] || [ ! -r "$hosts" ]; then stop "--hosts: cannot read '$hosts'"; fi
    mapfile -t names < <(awk '{ sub(/#.*/, "") } NF { print $1 }' "$hosts")
    [ ${#names[@]} -gt 0 ] || stop "--hosts: '$hosts' names no host"
    twice=$(printf '%s\n' "${names[@]}" | sort | uniq -d | head -n 1)
    [ -z "$twice" ] || stop "--hosts: '$hosts' names $twice twice (--per-host says how many ranks a host gets)"
    [ -n "$per_host" ] || stop "--per-host: wanted with --hosts"
fi
[ -n "$ranks$per_host" ] || stop "--ranks: got nothing, wanted how many"
most=$((${#names[@]} * ${per_host:-${ranks:-0}}))
ranks=${ranks:-$most}
[ "$ranks" -le "$most" ] || stop "--ranks: got $ranks, wanted at most $most (${#names[@]} hosts x --per-host $per_host)"

command=(mpirun --bind-to none --oversubscribe -np "$ranks")
if [ -n "$hosts" ]; then
    list=$(printf "%s slots=${per_host:-1}\n" "${names[@]}")
    command+=(--map-by "ppr:$per_host:node" --hostfile)
fi
exports=()
for name in $(compgen -e); do
    case $name in
    TRAIN | VAL | OUT | OMP_* | TRAIN_GPT_*) exports+=(-x "$name") ;;
    esac
done

if [ $print = yes ]; then
    [ -z "$hosts" ] || command+=(HOSTS)
    printf '%q ' "${command[@]}" "${exports[@]}" "$@"
    printf '\n'
    [ -z "$list" ] || printf '%s\n' "$list"
    exit 0
fi

file=''
trap '[ -z "$file" ] || rm -f "$file"' EXIT
if [ -n "$hosts" ]; then
    file=$(mktemp)
    printf '%s\n' "$list" >"$file"
    command+=("$file")
fi
# More ranks than cores: waiting ranks must let the others work.
if [ "${per_host:-$ranks}" -gt "$(nproc)" ]; then export OMPI_MCA_mpi_yield_when_idle=1; fi

child='' asked=0 interrupts=0 deadline=0 phase=0 # phase: 0 runs, 1 was asked to stop, 2 is being ended, 3 was killed
# shellcheck disable=SC2317 # called by traps
ask() {
    asked=1
    if [ "$1" = INT ]; then interrupts=$((interrupts + 1)); fi
    if [ -n "$child" ]; then kill -USR1 "$child" 2>/dev/null || true; fi
}
trap 'ask INT' INT
trap 'ask TERM' TERM
trap 'ask USR1' USR1
setsid "${command[@]}" "${exports[@]}" "$@" </dev/null & # a session of its own: ctrl-C at the terminal reaches this script only
child=$!
while kill -0 "$child" 2>/dev/null; do
    if [ $asked = 1 ] && [ $phase = 0 ]; then
        phase=1 deadline=$((SECONDS + grace))
    elif [ $phase = 1 ] && { [ $SECONDS -ge $deadline ] || [ $interrupts -ge 2 ]; }; then
        phase=2 deadline=$((SECONDS + 10))
        echo "launch_mpirun.sh: not stopped yet: killing the ranks" >&2
        kill -TERM "$child" 2>/dev/null || true
    elif [ $phase = 2 ] && [ $SECONDS -ge $deadline ]; then
        phase=3
        kill -KILL "$child" 2>/dev/null || true
    fi
    if [ $phase = 0 ]; then
        wait "$child" || true # until it ends, or a trap was called
    else
        sleep 1 || true
    fi
done
status=0
wait "$child" || status=$?
exit $status
