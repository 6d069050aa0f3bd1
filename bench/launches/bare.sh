#!/bin/bash
# The same Ray nodes and the same training as our launcher makes of it, as one would write it by hand: nodes by srun, readiness
# polled and never slept for. From its environment: PYTHON, RAY, STARTED (a file), SCRATCH (short), PORT, STORE_BYTES, WORDS (a file:
# the words of `ludus train`, one a line).
set -u
date +%s.%N >"$STARTED"
umask 077
head -c32 /dev/urandom | sha256sum | cut -d' ' -f1 >"$SCRATCH/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SCRATCH/token" RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address() { scontrol --oneliner show node "$1" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/'; }
head=$(address "${nodes[0]}")
start() { # NODE OPTION...
	local node=$1
	shift
	srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$RAY" start "$@" --node-ip-address="$(address "$node")" \
		--num-cpus=1 --object-store-memory="$STORE_BYTES" --disable-usage-stats --block >"$SCRATCH/ray-$node.log" 2>&1 &
}

start "${nodes[0]}" --head --port="$PORT" --include-dashboard=false --temp-dir="$SCRATCH/r"
until (exec 3<>"/dev/tcp/$head/$PORT") 2>/dev/null; do sleep 0.05; done
for node in "${nodes[@]:1}"; do
	start "$node" --address="$head:$PORT"
done
"$PYTHON" -m bench.launches.ready "$head:$PORT" "${#nodes[@]}" 2>"$SCRATCH/ready.log" || exit 3
mapfile -t words <"$WORDS"
exec "$PYTHON" -P -m ludus.cli.main "${words[@]}" --address "$head:$PORT"
