#!/usr/bin/env bash
# torchrun on two hosts that share a directory: network, process and host-name namespaces, joined by a link of 100 Mbit/s.
# As root, with iproute2. Leaves nothing. A host that is lost has no link and no processes left, as by a power cut:
# a torchrun that is merely killed leaves its ranks running.
#
#   hosts.sh [SCENARIO...]    exit status 0 if each job has ended with the bits of one that nobody interrupted
set -uo pipefail
here=$(dirname "$(realpath "$0")")
project=$(realpath "$here/../..")
python=$(realpath -s "$(command -v "${PYTHON:-$project/.venv/bin/python}")")
scenarios=${*:-returns fewer elastic endpoint_lost own_folders unmounted}
dir=$(mktemp -d /tmp/hosts.XXXXXX)
mkdir "$dir/known"
export PYTHONPATH=$project OMP_NUM_THREADS=1 KNOWN=$dir/known PACE=0.1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or restarted ranks read addresses of ended ones
net=hosts$$
declare -A hosts=()
bad=()

lose() { # HOST
    ip -n "$net-$1" link set "v$1-$$" down
    kill -9 "${hosts[$1]}"
    wait "${hosts[$1]}" 2>/dev/null
    unset "hosts[$1]"
    echo "$(date +%T) host $1 is lost"
}
stop() {
    trap - EXIT INT TERM
    for pid in "${hosts[@]}"; do kill -9 "$pid" && wait "$pid"; done 2>/dev/null
    for host in 1 2; do ip netns del "$net-$host" 2>/dev/null; done
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

for host in 1 2; do
    ip netns add "$net-$host" && ip -n "$net-$host" link set lo up || exit 2
done
ip link add "v1-$$" netns "$net-1" type veth peer name "v2-$$" netns "$net-2" || exit 2
for host in 1 2; do
    ip -n "$net-$host" addr add "10.77.0.$host/24" dev "v$host-$$"
    ip -n "$net-$host" link set "v$host-$$" up
    ip netns exec "$net-$host" tc qdisc add dev "v$host-$$" root tbf rate 100mbit burst 64kb latency 50ms 2>/dev/null \
        || echo "host $host: this kernel has no tbf, the link is as fast as it can be"
done

start() { # HOST NNODES
    GLOO_SOCKET_IFNAME=v$1-$$ ip netns exec "$net-$1" \
        unshare --uts --mount --pid --fork --mount-proc --kill-child=KILL sh -c "hostname host$1 && $mount && exec \
            $python -m torch.distributed.run --nnodes=$2 --nproc-per-node=1 --max-restarts=3 \
            --rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29400 --rdzv-id=job --local-addr=10.77.0.$1 \
            --rdzv-conf=is_host=$((2 - $1)),last_call_timeout=5 --shutdown-timeout=28 \
            $here/train.py $work/checkpoints 300" >> "$work/$1.out" 2>&1 &
    hosts[$1]=$!
}
await() { # TEXT SECONDS: until a line of a host has it
    for _ in $(seq "$2"); do cat "$work"/*.out | grep -q "$1" && return; sleep 1; done
    echo "no '$1' after $2 s"
    tail -n 5 "$work"/*.out
    return 1
}
begin() { # NNODES: both hosts train, and have saved step 40
    start 1 "$1"
    start 2 "$1"
    await "rank 0: begins" 120 || return
    for _ in $(seq 60); do [ -e "$work/checkpoints/step40" ] && return; sleep 0.5; done
}
come_back() { # HOST NNODES
    echo "$(date +%T) host $1 comes back"
    ip -n "$net-$1" link set "v$1-$$" up
    start "$1" "$2"
}
judge() { "$python" "$here/judge.py" "$work"/*.out; }

# Both are needed: host 1 waits for the other, and goes on with it
returns() {
    begin 2 && lose 2 && sleep 5 && come_back 2 2 && await "ends after" 240 && judge
}
# The job is started again on the host that is left
fewer() {
    begin 2 && lose 2 && lose 1 && ip -n "$net-1" link set "v1-$$" up && start 1 1 && await "ends after" 150 && judge
}
# One is enough: host 1 goes on alone, and takes the other in when it comes back
elastic() {
    begin 1:2 && lose 2 && await "one of 1 ranks" 150 && sleep 4 && come_back 2 1:2 && await "ends after" 240 && judge
}
# The host of the rendezvous: the other's torchrun waits for it, is ended by what started it, and both begin again
endpoint_lost() {
    begin 1:2 && lose 1 && sleep 90 || return
    kill -0 "${hosts[2]}" && echo "$(date +%T) torchrun of host 2 still waits"
    kill -9 "${hosts[2]}"
    wait "${hosts[2]}" 2>/dev/null
    come_back 1 2
    start 2 2
    await "ends after" 150 && judge
}

# Each host has another file system under the name of the root: refused before the first step
own_folders() {
    mkdir "$work/checkpoints"
    mount="mount -t tmpfs none $work/checkpoints"
    start 1 2
    start 2 2
    await "ranks 1 do not see in $work/checkpoints what rank 0 has written there" 120
}
# Host 2 loses the file system for a while: saves fail meanwhile, in words, and none after it
unmounted() {
    begin 2 || return
    local inside
    inside=$(pgrep -P "${hosts[2]}")
    nsenter -t "$inside" -m mount -t tmpfs none "$work/checkpoints"
    await "rank 0 has made this folder, and it is not seen here" 60 || return
    [ "$(nsenter -t "$inside" -m ls "$work/checkpoints")" = "" ] || return
    nsenter -t "$inside" -m umount "$work/checkpoints"
    await "ends after" 150 && judge && [ "$(grep -c "rank 0: begins" "$work/1.out")" = 1 ]
}

for scenario in $scenarios; do
    work=$dir/$scenario
    mount=true
    mkdir "$work"
    echo "=== $scenario, $(date +%T)"
    "$scenario" || bad+=("$scenario")
    for pid in "${hosts[@]}"; do kill -9 "$pid"; wait "$pid"; done 2>/dev/null
    hosts=()
    for host in 1 2; do ip -n "$net-$host" link set "v$host-$$" up; done
    cat "$work"/*.out | grep "begins\|leaves\|ends after\|no checkpoint in\|Error: " | sort | cut -c1-150 | sed 's/^/    /'
done
echo "not as it should be: ${bad[*]:-none}"
[ ${#bad[@]} = 0 ]
