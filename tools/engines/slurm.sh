#!/usr/bin/env bash
# Jobs under Slurm on this machine: munged, slurmctld, and two nodes, each a slurmd with a host name and processes
# of its own. As root, after `apt-get install slurm-wlm munge`; no systemd. Leaves nothing.
#
#   slurm.sh [SCENARIO...]    exit status 0 if each job has ended with the bits of one that nobody interrupted
set -uo pipefail
here=$(dirname "$(realpath "$0")")
project=$(realpath "$here/../..")
python=$(realpath -s "$(command -v "${PYTHON:-$project/.venv/bin/python}")")
scenarios=${*:-limit preempt requeue usr1 usr1_torchrun killed too_late array whole_array node_lost batch_node_lost batch crash}
dir=$(mktemp -d /tmp/slurm.XXXXXX)
chmod 755 "$dir" # munge wants everybody to reach its socket
mkdir "$dir/known"
export SLURM_CONF=$dir/slurm.conf PYTHONPATH=$project PATH=$(dirname "$python"):$PATH
export OMP_NUM_THREADS=1 KNOWN=$dir/known
declare -A daemons=()
bad=()

stop() {
    trap - EXIT INT TERM
    scancel --user=root 2>/dev/null
    for _ in $(seq 10); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 1; done
    { kill -9 "${daemons[@]}"; wait; } 2>/dev/null
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

# --- the cluster
free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }
dd if=/dev/urandom of="$dir/key" bs=1 count=128 2>/dev/null
chmod 400 "$dir/key"
munged --key-file="$dir/key" --socket="$dir/munge.sock" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" || exit 2
daemons[munged]=$(cat "$dir/munged.pid")
mkdir "$dir/state" "$dir/spool.n1" "$dir/spool.n2"
printf '127.0.0.1 localhost n1 n2 %s\n' "$(hostname)" > "$dir/hosts"
cat > "$SLURM_CONF" <<CONF
ClusterName=toy
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.sock
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=20
KillWait=30
RequeueExit=85,86
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$(free_port) CPUs=1
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$(free_port) CPUs=1
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
CONF
start_node() { # NAME
    unshare --uts --mount --pid --fork --mount-proc --kill-child=KILL sh -c \
        "hostname $1 && mount --bind $dir/hosts /etc/hosts && exec slurmd -D -N $1" > "$dir/$1.log" 2>&1 &
    daemons[$1]=$!
}
idle() { sinfo -h -N -p low -t idle | wc -l; }
await_idle() {
    for _ in $(seq 60); do [ "$(idle)" = 2 ] && return; sleep 1; done
    echo "no two nodes are idle"
    sinfo -N
    tail "$dir"/*.log
    exit 2
}
slurmctld -D > "$dir/slurmctld.out" 2>&1 &
daemons[slurmctld]=$!
sleep 1
start_node n1
start_node n2
await_idle
echo "$(sinfo --version), $(idle) nodes"

# --- what is done with a job
submit() { # FILE, options of sbatch: in a folder of the scenario's own, which a job of before may have used
    mkdir -p "$work"
    cp "$here/train.py" "$here/toy.py" "$work"
    local file=$1
    [ -e "$file" ] || file=$here/$1
    export STALLED=$work/stalled
    id=$(cd "$work" && sbatch --parsable --output="$work/%a.out" "${@:2}" "$file")
}
await() { # TEXT SECONDS: until a line of the job's output has it
    for _ in $(seq "$2"); do grep -qs "$1" "$work"/*.out && return; sleep 1; done
    echo "no '$1' after $2 s"
    return 1
}
again() { # a requeued job waits for two minutes: it is told to begin now
    for _ in $(seq 90); do
        [ "$(squeue -h -j "${1:-$id}" -o %T 2>/dev/null)" = PENDING ] && break
        sleep 1
    done
    echo "$(date +%T) $(squeue -h -j "${1:-$id}" -o 'job %i %T %r')"
    sleep 2
    scontrol update JobId="${1:-$id}" StartTime=now TimeLimit=10
}
ended() { # SECONDS: until no job is left
    for _ in $(seq "$1"); do [ -z "$(squeue -h)" ] && return; sleep 1; done
    echo "a job has not ended after $1 s"
    squeue
    return 1
}
state_of() { scontrol show job "$id" | grep -o "JobState=[A-Z_]*\|Restarts=[0-9]*\|ExitCode=[0-9:]*" | paste -sd' '; }
expect() { # WORDS: state_of has them
    echo "$(date +%T) $(state_of)"
    [[ $(state_of) == *"$1"* ]]
}
judge() { "$python" "$here/judge.py" "${@:-$work/4294967294.out}"; } # %a of what is no array

# srun alone; SIGTERM of --signal goes to the tasks; what they end with is srun's code, and the script requeues
limit() {
    export PACE=0.4
    submit srun.sbatch --time=2 && await "rank 0: leaves" 150 && again && await "rank 0: ends" 150 && ended 60 && judge
}
# srun torchrun; a partition of higher priority asks for the nodes
preempt() {
    export PACE=0.1
    submit torchrun.sbatch --time=5 && await "rank 0: begins" 90 && sleep 8 || return
    sbatch -p high -N2 -o /dev/null --wrap "sleep 2" && await "rank 0: leaves" 60 || return
    again && await "rank 0: ends" 150 && ended 60 && judge
}
# an operator requeues it: SIGTERM to the tasks, SIGKILL after KillWait
requeue() {
    export PACE=0.1
    submit srun.sbatch --time=5 && await "rank 0: begins" 90 && sleep 8 && scontrol requeue "$id" || return
    await "rank 0: leaves" 60 && again && await "rank 0: ends" 150 && ended 60 && judge
}
# SIGUSR1 with a grace of its own, and RequeueExit
usr1() {
    export PACE=0.4
    submit requeue_exit.sbatch --time=3 && await "rank 0: leaves" 210 && again || return
    await "rank 0: ends" 150 && ended 60 && judge
}
# torchrun passes SIGUSR1 on if it is told to
usr1_torchrun() {
    export PACE=0.4
    local handled="--shutdown-timeout=58 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    sed "s/TERM@30/USR1@60/; s/--shutdown-timeout=28/$handled/" "$here/torchrun.sbatch" > "$dir/usr1.sbatch"
    submit "$dir/usr1.sbatch" --time=3 && await "rank 0: leaves" 210 && again || return
    await "rank 0: ends" 150 && ended 60 && judge
}
# One rank is killed, as for memory: the script requeues
killed() {
    export PACE=0.1
    submit srun.sbatch --time=5 && await "rank 0: begins" 90 || return
    for _ in $(seq 60); do [ -e "$work/checkpoints/step40" ] && break; sleep 0.5; done
    for pid in $(pgrep -f "train.py checkpoints"); do
        [ "$(readlink "/proc/$pid/cwd")" = "$work" ] || continue
        tr '\0' '\n' < "/proc/$pid/environ" | grep -qx SLURM_PROCID=1 && kill -9 "$pid" && echo "rank 1 is killed"
    done
    again && await "rank 0: ends" 150 && ended 60 && judge
}
# A step takes longer than the grace: 86, and RequeueExit; no last save, so that it goes on from the one before
too_late() {
    export PACE=0.1,50:30 GRACE_S=8
    submit requeue_exit.sbatch --time=5 && await "rank 0: begins" 90 && sleep 15 || return
    scancel --signal=TERM "$id" && await "no time left" 60 && again || return
    await "rank 0: begins after step 40" 90 && await "rank 0: ends" 150 && ended 60 && judge
}
starts_of() { grep -c "rank 0: begins" "$work/$1.out"; } # TASK
await_starts() { # until both tasks of an array train
    for _ in $(seq 90); do grep -qs begins "$work/0.out" && grep -qs begins "$work/1.out" && return; sleep 1; done
    return 1
}
# Two tasks of an array; the one whose job has the array's number is asked to leave, the other goes on
array() {
    export PACE=0.2
    submit array.sbatch --time=5 && await_starts && sleep 12 || return
    local one other
    one=$(squeue -h -r -j "$id" -o "%A %K" | awk -v id="$id" '$1 == id {print $2}')
    other=$((1 - one))
    echo "job $id is task $one"
    scancel --signal=TERM "${id}_$one" && await "rank 0: leaves" 60 && again "${id}_$one" && ended 240 || return
    echo "starts of task $one: $(starts_of $one), of task $other: $(starts_of $other)"
    [ "$(starts_of $one)$(starts_of $other)" = 21 ] && judge "$work/0.out" && judge "$work/1.out"
}
# What the array's number means to scontrol: all of its tasks
whole_array() {
    export PACE=0.2
    submit array.sbatch --time=5 && await_starts && sleep 12 && scontrol requeue "$id" || return
    again "${id}_0" && again "${id}_1" && ended 240 || return
    echo "starts of task 0: $(starts_of 0), of task 1: $(starts_of 1)"
    [ "$(starts_of 0)$(starts_of 1)" = 22 ] && judge "$work/0.out" && judge "$work/1.out"
}
lose() { # NODE: as by a power cut, once step 40 is saved
    export PACE=0.2
    submit srun.sbatch --time=10 && await "rank 0: begins" 90 || return
    for _ in $(seq 60); do [ -e "$work/checkpoints/step40" ] && break; sleep 0.5; done
    kill -9 "${daemons[$1]}"
    wait "${daemons[$1]}" 2>/dev/null
    echo "$(date +%T) node $1 is lost"
    again && sinfo -h -N -p low -o "%N %T" && start_node "$1" || return
    await "rank 0: begins after step [1-9]" 150 && await "rank 0: ends" 150 && ended 60 && judge
}
node_lost() { lose n2; }
batch_node_lost() { lose n1; }
# A signal to the batch shell alone, as of --signal=B:TERM@N: bash dies, Slurm ends the tasks, which save; nobody requeues
batch() {
    export PACE=0.1
    submit srun.sbatch --time=5 && await "rank 0: begins" 90 && sleep 8 || return
    scancel --batch --signal=TERM "$id" && await "rank 0: leaves" 60 && ended 60 && expect "JobState=FAILED" || return
    echo "by hand:"
    submit srun.sbatch --time=5 && await "rank 0: ends" 150 && ended 60 && judge
}
# A script that crashes at its start is not requeued
crash() {
    export PACE=crash
    submit srun.sbatch --time=5 && await "ValueError" 90 && ended 60 && expect "JobState=FAILED Restarts=0"
}

for scenario in $scenarios; do
    work=$dir/$scenario
    echo "=== $scenario, $(date +%T)"
    unset GRACE_S
    "$scenario" || bad+=("$scenario")
    scancel --user=root
    ended 60
    grep -hs "begins\|leaves\|ends after\|no time left\|Error: " "$work"/*.out | sort | cut -c1-150 | sed 's/^/    /'
    await_idle
done
echo "not as it should be: ${bad[*]:-none}"
[ ${#bad[@]} = 0 ]
