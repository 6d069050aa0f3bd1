#!/bin/sh
# Builds the images and starts the pipeline of docker/compose.yaml with Docker, as a user does:  scripts/smoke_containers.sh
# Needs Docker with Compose, a network, 15 GB and half an hour. Everything but the images is removed at the end.
set -eu
code=1
cd "$(dirname "$0")/.."
export COMPOSE_PROJECT_NAME=ludus-smoke
compose() { docker compose -f docker/compose.yaml "$@"; }
out=$(mktemp -d)
trap 'code=$?; [ $code -eq 0 ] || compose logs --tail 50; compose down --volumes --timeout 20; rm -rf "$out"; exit $code' EXIT
trap 'exit 130' INT TERM

docker build -f docker/Dockerfile -t ludus:cpu .
docker run --rm --read-only --tmpfs /tmp --cap-drop ALL ludus:cpu train CartPole-v1 --stop iterations=1 --local-dir /tmp/runs
docker run --rm --entrypoint cat ludus:cpu /usr/local/lib/ludus/sbom.cdx.json | grep -q 'pkg:generic/python@'

compose build
compose up --detach --wait --wait-timeout 600
store='s3://ludus/arena?endpoint=http://s3:8333'
chmod 777 "$out"
tries=60  # a checkpoint every 2 minutes
until compose run --rm -T -v "$out:/out" learner export "$store" --out /out; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || { echo "smoke_containers.sh: the learner has saved no checkpoint" >&2; exit 1; }
    sleep 10
done
ls "$out"/*.onnx
echo "smoke_containers.sh: the images work"
