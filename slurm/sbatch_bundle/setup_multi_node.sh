#!/bin/bash
# Starts one node of a multi-node PyTorch job without a scheduler. Run it on every node, for example:
#
#     MASTER_ADDR=192.168.1.100 NODE_RANK=0 ./setup_multi_node.sh train.py ARGUMENTS...
#     MASTER_ADDR=192.168.1.100 NODE_RANK=1 ./setup_multi_node.sh train.py ARGUMENTS...
#
#   MASTER_ADDR     address of node 0 (default: localhost)
#   MASTER_PORT     free port on node 0 (29500)
#   NNODES          number of nodes (2)
#   NPROC_PER_NODE  processes per node (2)
#   NODE_RANK       unique rank of this node, from 0 (0)
#   WAIT_SECONDS    time-out for node 0 to start (60)
#
# Exit code 2: invalid variable; 3: node 0 cannot be reached; else torchrun's.
set -u

export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-29500}
export NNODES=${NNODES:-2} NPROC_PER_NODE=${NPROC_PER_NODE:-2} NODE_RANK=${NODE_RANK:-0}
WAIT_SECONDS=${WAIT_SECONDS:-60}

fail() {
    printf 'setup_multi_node.sh: %s\n' "$2" >&2
    exit "$1"
}

# number NAME LOWEST HIGHEST
number() {
    local value=${!1}
    [[ $value =~ ^[0-9]{1,6}$ ]] || fail 2 "$1: got $value, expected a whole number"
    ((10#$value >= $2 && 10#$value <= $3)) || fail 2 "$1: got $value, expected $2 to $3"
    printf -v "$1" %d $((10#$value)) # to bash 010 is 8, and 08 no number
}
number NNODES 1 100000
number NPROC_PER_NODE 1 1000
number NODE_RANK 0 $((NNODES - 1))
number MASTER_PORT 1 65535
number WAIT_SECONDS 0 86400
[ $# -gt 0 ] || fail 2 "missing script. Usage: setup_multi_node.sh train.py ARGUMENTS..."
[ -f "$1" ] || fail 2 "$1: no such file on $(hostname)"
if command -v torchrun > /dev/null; then
    torchrun=(torchrun)
elif command -v python3 > /dev/null && python3 -c 'import torch' 2> /dev/null; then
    torchrun=(python3 -m torch.distributed.run)
else
    fail 2 "torchrun: not found on $(hostname). Activate the environment with PyTorch"
fi

# addresses: the addresses of MASTER_ADDR, one per line.
addresses() {
    getent ahostsv4 "$MASTER_ADDR" | while read -r address _; do echo "$address"; done | sort -u
}
master=$(addresses)
[ -n "$master" ] || fail 2 "MASTER_ADDR: $MASTER_ADDR cannot be resolved on $(hostname). Use node 0's IP address"

# interface: the local network interface with one of node 0's addresses (on node 0 only).
interface() {
    local name rest
    command -v ip > /dev/null || return 0
    ip -o -4 address show | while read -r _ name _ rest; do
        rest=${rest%%/*}
        grep -qxF "$rest" <<< "$master" && echo "$name"
    done | head -n 1
}

# open SECONDS: whether a process listens at node 0's address and port. A firewall may leave the question unanswered.
open() {
    # shellcheck disable=SC2016
    timeout "$1" bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$MASTER_ADDR" "$MASTER_PORT" 2> /dev/null
}

device=$(interface)
if [ "$NODE_RANK" -eq 0 ]; then
    ! command -v ip > /dev/null || [ -n "$device" ] ||
        fail 2 "NODE_RANK: got 0, but MASTER_ADDR=$MASTER_ADDR is not an address of $(hostname)"
    ! open 5 || fail 2 "MASTER_PORT: $MASTER_PORT is in use on $(hostname). Use another port on all nodes"
else
    deadline=$((SECONDS + WAIT_SECONDS))
    until open $((SECONDS + 5 <= deadline ? 5 : SECONDS < deadline ? deadline - SECONDS : 1)); do
        ((SECONDS < deadline)) || fail 3 "node 0 does not respond at $MASTER_ADDR:$MASTER_PORT after $WAIT_SECONDS s. \
Check that it is started, the address is correct and no firewall blocks the port"
        sleep 0.5
    done
    [ -n "$device" ] || ! command -v ip > /dev/null ||
        device=$(ip -o route get "${master%%$'\n'*}" | sed -n 's/.* dev \([^ ]*\).*/\1/p')
fi
# If a machine's own name resolves to 127.0.1.1, as on Debian, each rank would wait on its own loopback.
# NCCL takes a name for the beginning of several (eth1, eth10), but with an equals sign before it.
if [ "$NNODES" -gt 1 ] && [ -n "$device" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$device}
fi

echo "$(hostname): node $NODE_RANK of $NNODES, $NPROC_PER_NODE processes, node 0 at $MASTER_ADDR:$MASTER_PORT"
exec "${torchrun[@]}" --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE" --node-rank="$NODE_RANK" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
