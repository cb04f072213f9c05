#!/usr/bin/env bash
# Trains on your own hosts: starts a server on every host over ssh, then the training program here.
#
#   ./hosts.sh ps0,ps1 worker0,worker1 chief python train.py --epochs=3
#
# Arguments: the hosts of the parameter servers, those of the workers, the name or address of this
# host for them, and the training program. A host is `name` or `name:port`; the port is 2222 if none
# is given. Tasks on one host need different ports.
#
# Environment variables:
#   PYTHON  Python on the servers' hosts, which must find het_tf. Default: python3
#   SSH     command that runs a command on a host. Default: ssh -o BatchMode=yes
#
# Failed servers are started again. All servers end with the training program, however it ends:
# their standard input is a pipe that this process holds.
set -euo pipefail

if (($# < 4)); then
  echo "usage: $0 PS_HOSTS WORKER_HOSTS CHIEF_HOST PROGRAM [ARGUMENT...]" >&2
  exit 2
fi
IFS=, read -ra ps <<<"$1"
IFS=, read -ra workers <<<"$2"
chief=$3
shift 3
python=${PYTHON:-python3}
read -ra ssh <<<"${SSH:-ssh -o BatchMode=yes}"

address() { [[ $1 == *:* ]] && echo "$1" || echo "$1:2222"; }
addresses() {
  local host list=
  for host; do list+=", \"$(address "$host")\""; done
  echo "[${list#, }]"
}
cluster="{\"ps\": $(addresses "${ps[@]}"), \"worker\": $(addresses "${workers[@]}"), \
\"chief\": $(addresses "$chief")}"
tf_config() { echo "{\"cluster\": $cluster, \"task\": {\"type\": \"$1\", \"index\": $2}}"; }

serve() { # TYPE INDEX HOST
  # `read -t 0` succeeds when the pipe is closed: nothing is ever written to it.
  until "${ssh[@]}" "${3%:*}" \
    "exec env PYTHONSAFEPATH=1 TF_CONFIG='$(tf_config "$1" "$2")' $python -m het_tf.server --exit_with_parent" ||
    read -t 0; do
    echo "$0: the server of $1 $2 on $3 failed, and is started again" >&2
    sleep 1
  done
}
serve_all() {
  local i
  for i in "${!ps[@]}"; do serve ps "$i" "${ps[i]}" <&0 & done
  for i in "${!workers[@]}"; do serve worker "$i" "${workers[i]}" <&0 & done
}

exec 3> >(serve_all)
TF_CONFIG=$(tf_config chief 0) exec "$@"
