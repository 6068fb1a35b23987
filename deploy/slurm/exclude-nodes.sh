#!/bin/sh
# Print the nodes at risk, for a submit script: sbatch --exclude="$(exclude-nodes.sh)" train.sh
# Without a response or valid scores, it prints nothing on stdout and the reason on stderr, so that the job is submitted anyway.
# PREDRAIN_URL (http://127.0.0.1:8080) is the service, PREDRAIN_TOKEN_FILE a file with a `read` token.
set -u
url="${PREDRAIN_URL:-http://127.0.0.1:8080}/v1/nodes?format=hostlist"
token=$(cat "${PREDRAIN_TOKEN_FILE:-/dev/null}")

# sbatch rejects lists with unknown nodes.
if known=$(sinfo --noheader --Node --format=%N) &&
    listed=$(printf 'Authorization: Bearer %s' "$token" | curl -fsS --max-time 5 -H @- "$url"); then
    printf '%s\n' "$listed" | tr , '\n' | grep -Fx -e "$known" | paste -sd, -
else
    echo "exclude-nodes.sh: no node is excluded" >&2
fi
exit 0
