#!/bin/sh
# Deploy llama-swap's configuration to a box, and rely on it only once a timed probe of each model says that it is on the GPU:
#
#     examples/deploy.sh me@box config.yaml MODEL...
#
# A reload stops every running server. One that is spawned again while the old one's memory still drains falls back to the CPU for
# good, silently: the probe finds that by the time of 200 tokens, has it unloaded, and asks once more.
# Exit code: 0 healthy, 1 healed, 2 a model stays on the CPU (or a step failed), 3 it could not be told.
set -eu

if [ $# -lt 3 ]; then
    echo "usage: $0 USER@BOX CONFIG.yaml MODEL..." >&2
    exit 3
fi
box=$1 config=$2
shift 2
CONFIG_THERE=${CONFIG_THERE:-/etc/llama-swap/config.yaml}
SERVICE=${SERVICE:-llama-swap}
URL=${URL:-http://127.0.0.1:8080} # as seen from the box
LLMGUARD=${LLMGUARD:-/opt/llmguard/llmguard.py}

rsync --checksum "$config" "$box:$CONFIG_THERE" || exit 2
# A user's own service: SERVICE_CTL="systemctl --user". A reload leaves the front up; the probe waits for models in use.
ssh "$box" "${SERVICE_CTL:-sudo systemctl} reload $SERVICE" || exit 2
sleep "${SETTLE:-5}" # llama-swap stops its servers, and their memory drains

quote() { printf "'%s' " "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }
models=""
for model in "$@"; do models="$models$(quote "$model")"; done
code=0
ssh "$box" "python3 $LLMGUARD probe --url $URL $models" || code=$?
[ "$code" -le 3 ] || code=3 # ssh's own failures are 255
exit "$code"
