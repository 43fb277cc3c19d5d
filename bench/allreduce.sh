#!/usr/bin/env bash
# Measures our collectives and those of MPICH, Open MPI, Intel MPI and gloo on this machine.
#
#   bench/allreduce.sh [--ranks "2 4 8"] [--rounds 3] [--collectives "all_reduce"] [--max BYTES] [--out FILE.json]
#                      [--buffers arena|private] [--offset BYTES] [--before FOLDER]
#
# --buffers private: ours on memory that peers cannot reach in place, as an embedder's own. --offset: private buffers, and those
# of the MPIs, begin so many bytes after the beginning of a page. --before: also the mgpurun and collective_perf of an earlier
# state, in this folder.
#
# Contenders alternate: in every round each runs once, in random order, so that background load does not hit one
# alone; figures are medians of the rounds. Peers are searched in the folder $MGPU_PEERS (default: target/peers) and
# skipped if they are not there; bench/README.md says how to install them. Writes
# bench/results/allreduce-<date>-<machine>.json and .svg, and prints a table of ratios. Run it on a quiet machine,
# after `cargo build --release`.
set -euo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"; }
note() { printf '%s\n' "$*" >&2; }

words=("$@")
ranks_list="2 4 8" rounds=3 collectives=all_reduce max=$((64 << 20)) out= buffers=arena offset= before=
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) usage && exit ;;
        --ranks | --rounds | --collectives | --max | --out | --buffers | --offset | --before) [ $# -gt 1 ] || { note "$1 needs a value" && exit 2; } ;;
        *) note "unknown option $1; see $0 --help" && exit 2 ;;
    esac
    case $1 in
        --ranks) ranks_list=$2 ;;
        --rounds) rounds=$2 ;;
        --collectives) collectives=$2 ;;
        --max) max=$2 ;;
        --out) out=$(realpath -m "$2") ;;
        --buffers) buffers=$2 ;;
        --offset) offset=$2 ;;
        --before) before=$(realpath -m "$2") ;;
    esac
    shift 2
done
[[ $offset =~ ^[0-9]*$ ]] || { note "--offset is a number of bytes" && exit 2; }
case $buffers in arena | private) ;; *) note "--buffers is arena or private" && exit 2 ;; esac
for number in $ranks_list $rounds $max; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || { note "$number is not a positive number" && exit 2; }
done

peers=$(realpath -m "${MGPU_PEERS:-$(dirname "$0")/../target/peers}")
cd "$(dirname "$0")/.."
bin=target/release
built=target/bench-peers
cores=$(nproc)
out=${out:-bench/results/allreduce-$(date --utc +%F)-$(bench/describe_machine.sh --slug).json}
provenance=$(python3 bench/provenance.py bench/allreduce.sh "${words[@]}")
mkdir -p "$built" "$(dirname "$out")"
for folder in "$bin" ${before:+"$before"}; do
    for program in mgpurun collective_perf; do
        [ -x "$folder/$program" ] || { note "there is no $folder/$program: run cargo build --release" && exit 1; }
    done
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
lines=$scratch/lines.jsonl
touch "$lines"

# The contenders, their versions as name=version, and what was skipped and why.
contenders=(mgpu ${before:+before}) versions=() skipped=()
skip() { note "skipped: $1" && skipped+=("$1"); }
add() { # NAME VENV PACKAGE
    contenders+=("$1")
    versions+=("$1=$("$peers/$2/bin/python" -c \
        'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$3")")
}
compile() { # NAME COMPILER [FLAGS]
    local name=$1 log=$built/$1.log
    shift
    if "$@" -O3 -march=native bench/peers/collectives_mpi.c -o "$built/$name" "${link[@]}" > "$log" 2>&1; then
        return 0
    fi
    skip "$name: its program does not compile, see $log"
    return 1
}
for name in mpich openmpi; do
    venv=$peers/v-$name link=()
    if [ ! -x "$venv/bin/mpicc" ]; then
        skip "$name: not installed"
    elif compile "$name" "$venv/bin/mpicc"; then
        add "$name" "v-$name" "$name"
    fi
done
venv=$peers/v-impi-devel
if [ ! -x "$venv/bin/mpiexec" ]; then
    skip "impi: not installed"
else
    link=(-I "$venv/include" -L "$venv/lib" -lmpi "-Wl,-rpath,$venv/lib")
    if compile impi gcc; then add impi v-impi-devel impi-devel; fi
fi
if [ -x "$peers/v/bin/torchrun" ]; then
    add gloo v torch
else
    skip "gloo: not installed"
fi

at_most() { if [ "$max" -gt "$1" ]; then echo "$1"; else echo "$max"; fi; }

# One run of one contender; its lines go to standard output. With more ranks than cores, other settings are needed.
contend() { # NAME COLLECTIVE RANKS
    local crowded=
    [ "$3" -gt "$cores" ] && crowded=yes
    # torchrun stops its ranks slowly; processes that do not end at all are killed.
    local limit=(timeout -k 10 120) wait=() place=(${offset:+--offset "$offset"})
    [ "$crowded" ] && wait=(I_MPI_WAIT_MODE=1)
    case $1 in
        mgpu)
            "$bin/mgpurun" -n "$3" --no-prefix collective_perf --check --bound --buffers "$buffers" "${place[@]}" --collective "$2" --max "$max"
            ;;
        before)
            "$before/mgpurun" -n "$3" --no-prefix collective_perf --buffers "$buffers" "${place[@]}" --collective "$2" --max "$max" |
                sed 's/"impl":"mgpu"/"impl":"before"/'
            ;;
        mpich)
            # It only spins: with one core for two ranks, an operation takes scheduler time slices.
            "${limit[@]}" "$peers/v-mpich/bin/mpiexec" -n "$3" "$built/mpich" --collective "$2" \
                "${place[@]}" --max "$(if [ "$crowded" ]; then at_most 65536; else echo "$max"; fi)"
            ;;
        openmpi)
            "${limit[@]}" "$peers/v-openmpi/bin/mpiexec" --allow-run-as-root --oversubscribe -n "$3" \
                "$built/openmpi" --collective "$2" "${place[@]}" --max "$max"
            ;;
        impi)
            env I_MPI_FABRICS=shm "${wait[@]}" "${limit[@]}" "$peers/v-impi-devel/bin/mpiexec" -n "$3" \
                "$built/impi" --collective "$2" "${place[@]}" --max "$max"
            ;;
        gloo)
            OMP_NUM_THREADS=1 "${limit[@]}" "$peers/v/bin/torchrun" --nproc-per-node "$3" -- \
                bench/peers/collectives_gloo.py --collective "$2" --max "$(at_most $((64 << 20)))"
            ;;
    esac
}

for ((round = 0; round < rounds; round++)); do
    for collective in $collectives; do
        for ranks in $ranks_list; do
            # Shuffled: after the same predecessor a virtual machine may be in the same state each time.
            for name in $(shuf --echo -- "${contenders[@]}"); do
                note "round $((round + 1)) of $rounds: $collective on $ranks ranks: $name"
                status=0
                contend "$name" "$collective" "$ranks" < /dev/null > "$scratch/out" 2> "$scratch/err" || status=$?
                # A stopped run may have left a partial line.
                grep '^{.*}$' "$scratch/out" >> "$lines" || true
                [ "$status" = 0 ] && continue
                if [ "$name" = mgpu ]; then
                    cat "$scratch/err" >&2
                    exit 1
                fi
                why="ended with exit code $status"
                case $status in 124 | 137) why="stopped after 120 s" ;; esac
                skip "round $((round + 1)): $name, $collective on $ranks ranks, $why: kept $(grep -c '^{.*}$' \
                    "$scratch/out" || true) sizes"
                tail -n 3 "$scratch/err" >&2
            done
        done
    done
done

python3 bench/summarise_allreduce.py "$lines" "$out" --provenance "$provenance" --rounds "$rounds" \
    "${versions[@]/#/--version=}" "${skipped[@]/#/--skipped=}"
python3 bench/plot_allreduce.py "$out" "${out%.json}.svg"
note "wrote $out and ${out%.json}.svg"
