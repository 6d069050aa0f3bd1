#!/bin/bash
# The same Ray nodes and the same training as our launcher makes of it, as one would write it by hand: nodes by srun, readiness
# polled and never slept for. From its environment: PYTHON, RAY, STARTED (a file), SCRATCH (short), PORT, STORE_BYTES, WORDS_FILE (the
# words of `ludus train`, one a line).
set -u
date +%s.%N >"$STARTED"
umask 077
head -c32 /dev/urandom | sha256sum | cut -d' ' -f1 >"$SCRATCH/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SCRATCH/token" RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address() { scontrol --oneliner show node "$1" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/'; }
head=$(address "${nodes[0]}")
# Here all nodes are one machine: each needs ports and a directory of its own, or they get into each other's way.
start() { # NUMBER OPTION...
	local node=${nodes[$1]} first=$((PORT + 1 + 40 * $1)) directory="$SCRATCH/r$1"
	shift
	srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$RAY" start "$@" --node-ip-address="$(address "$node")" \
		--node-manager-port=$first --object-manager-port=$((first + 1)) --metrics-export-port=$((first + 2)) \
		--runtime-env-agent-port=$((first + 3)) --dashboard-agent-listen-port=$((first + 4)) \
		--dashboard-agent-grpc-port=$((first + 5)) --min-worker-port=$((first + 6)) --max-worker-port=$((first + 39)) \
		--temp-dir="$directory" --num-cpus=1 --object-store-memory="$STORE_BYTES" --include-log-monitor=false \
		--disable-usage-stats --block >"$SCRATCH/ray-$node.log" 2>&1 &
}

start 0 --head --port="$PORT" --include-dashboard=false
until (exec 3<>"/dev/tcp/$head/$PORT") 2>/dev/null; do sleep 0.05; done
for number in "${!nodes[@]}"; do
	[ "$number" = 0 ] || start "$number" --address="$head:$PORT"
done
"$PYTHON" -m bench.launches.ready "$head:$PORT" "${#nodes[@]}" 2>"$SCRATCH/ready.log" || exit 3
mapfile -t words <"$WORDS_FILE"
exec "$PYTHON" -P -m ludus.cli.main "${words[@]}" --address "$head:$PORT"
