#!/bin/sh
# A small Slurm cluster on this machine: munged, slurmctld, and a slurmd for each node, all as root.
#
#   tests/engines/slurm.sh up DIR [NODES]    start it (2 nodes), with all its files in DIR
#   SLURM_CONF=DIR/slurm.conf srun -N 2 ...  use it
#   tests/engines/slurm.sh down DIR          end it
#
# Debian: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge
# The nodes mgpu0, mgpu1 ... have ports of their own, and all have the address 127.0.0.1. Nothing outside DIR is changed.
set -eu

fail() {
    echo "slurm.sh: $*" >&2
    exit 1
}

# A program, which Debian may have put where only root looks.
find_program() {
    PATH=$PATH:/usr/sbin:/sbin command -v "$1" || fail "there is no $1: install slurmctld, slurmd, slurm-client and munge"
}

# Waits up to 20 s until a command succeeds.
wait_for() {
    tries=200
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.1
    done
}

is_idle() {
    [ "$(sinfo -h -t idle -o %D)" = "$1" ]
}

up() {
    dir=$1 nodes=$2
    [ "$(id -u)" = 0 ] || fail "slurmd has to be started as root"
    munged=$(find_program munged) slurmctld=$(find_program slurmctld) slurmd=$(find_program slurmd)
    mkdir -p "$dir/state" "$dir/spool" "$dir/run"
    dir=$(cd "$dir" && pwd)
    chmod 755 "$dir"
    [ ! -S "$dir/run/munge.socket" ] || fail "$dir has a cluster already: slurm.sh down $dir ends it"
    # Whatever fails from here on, nothing is left running.
    trap 'down "$dir"' EXIT
    dd if=/dev/urandom of="$dir/munge.key" bs=128 count=1 2>/dev/null
    chmod 400 "$dir/munge.key"
    # munged wants folders that nobody else can write to; --force for those above DIR, such as /tmp.
    "$munged" --force --key-file="$dir/munge.key" --socket="$dir/run/munge.socket" --pid-file="$dir/run/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" 2>"$dir/munged.err" ||
        fail "munged does not start: $(cat "$dir/munged.err")"
    host=$(hostname -s)
    {
        echo "ClusterName=mgpu"
        echo "SlurmctldHost=$host(127.0.0.1)"
        echo "SlurmUser=root"
        echo "AuthType=auth/munge"
        echo "AuthInfo=socket=$dir/run/munge.socket"
        echo "CredType=cred/munge"
        echo "SlurmctldPort=$PORT"
        echo "SlurmctldPidFile=$dir/run/slurmctld.pid"
        echo "SlurmdPidFile=$dir/run/slurmd-%n.pid"
        echo "SlurmdSpoolDir=$dir/spool/%n"
        echo "StateSaveLocation=$dir/state"
        echo "SlurmctldLogFile=$dir/slurmctld.log"
        echo "SlurmdLogFile=$dir/slurmd-%n.log"
        echo "ProctrackType=proctrack/linuxproc"
        echo "TaskPlugin=task/none"
        echo "SelectType=select/cons_tres"
        echo "SelectTypeParameters=CR_Core"
        echo "SchedulerParameters=sched_interval=1,batch_sched_delay=0"
        echo "MpiDefault=none"
        echo "ReturnToService=2"
        echo "SlurmdParameters=config_overrides"
        echo "KillWait=5"
        node=0
        while [ "$node" -lt "$nodes" ]; do
            echo "NodeName=mgpu$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + 1 + node)) CPUs=8"
            node=$((node + 1))
        done
        echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    } >"$dir/slurm.conf"
    export SLURM_CONF="$dir/slurm.conf"
    "$slurmctld" -c -f "$SLURM_CONF" || fail "slurmctld does not start: see $dir/slurmctld.log"
    node=0
    while [ "$node" -lt "$nodes" ]; do
        mkdir -p "$dir/spool/mgpu$node"
        "$slurmd" -c -f "$SLURM_CONF" -N "mgpu$node" || fail "slurmd does not start: see $dir/slurmd-mgpu$node.log"
        node=$((node + 1))
    done
    wait_for is_idle "$nodes" || fail "the nodes do not become idle: $(sinfo 2>&1); see $dir/*.log"
    trap - EXIT
    echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
    dir=$(cd "$1" && pwd) || fail "there is no folder $1"
    for file in "$dir"/run/slurmd-*.pid "$dir/run/slurmctld.pid" "$dir/run/munged.pid"; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        kill "$pid" 2>/dev/null || continue
        # A zombie counts as ended: in a container nobody may reap it.
        wait_for has_ended "$pid" || kill -9 "$pid" 2>/dev/null || true
    done
    rm -f "$dir"/run/*
}

has_ended() {
    ! kill -0 "$1" 2>/dev/null || grep -q '^State:.*Z' "/proc/$1/status"
}

PORT=${MGPU_SLURM_PORT:-26817}
case "${1-} $#" in
    "up 2") up "$2" 2 ;;
    "up 3") up "$2" "$3" ;;
    "down 2") down "$2" ;;
    *) fail "usage: slurm.sh up DIR [NODES], or slurm.sh down DIR" ;;
esac
