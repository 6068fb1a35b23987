#!/bin/sh
# Installs and starts the systemd units of predrain: on the host with Slurm's commands all but the collectors of a node, with
# --node the collectors of a GPU node. Existing settings are kept. Running it again changes nothing.
set -eu

usage='usage: install.sh [--node] [--root FOLDER] [--dry-run]
  --node     install the collectors of a GPU node: kernel log, and NVML (not started) for nodes without an exporter
  --root     install below this folder, and start nothing
  --dry-run  print the commands only'
here=$(cd "$(dirname "$0")/.." && pwd)
units='exporters.service prometheus.service prometheus.timer slurm.service tickets.service tickets.timer compact.service
compact.timer score.service score.timer retrain.service retrain.timer serve.service act.service'
started='exporters.service prometheus.timer slurm.service tickets.timer compact.timer score.timer retrain.timer serve.service
act.service'
root='' dry='' node=''
while [ $# -gt 0 ]; do
    case $1 in
    --node) node=1 units='kernel-log.service nvml.service' started='kernel-log.service' ;;
    --root) root=${2:?$usage} && shift ;;
    --dry-run) dry=1 ;;
    *) echo "$usage" >&2 && exit 2 ;;
    esac
    shift
done

run() {
    if [ "$dry" ]; then echo "would run: $*"; else "$@"; fi
}
put() { # FILE DESTINATION MODE: replace atomically, unless it is equal
    cmp -s "$1" "$2" && return
    run install -D -m "$3" "$1" "$2.new"
    run mv "$2.new" "$2"
    changed="$changed ${2##*/}"
}

if [ ! "$root" ]; then
    [ "$dry" ] || [ "$(id -u)" = 0 ] || { echo 'install.sh: run it as root' >&2; exit 1; }
    # The PATH of the units, which cannot read home folders.
    found=$(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin command -v predrain) || found=
    case $(readlink -f "${found:-/home}") in
    /home* | /root*)
        echo 'install.sh: predrain not found: install it into a virtual environment in /opt/predrain, and link' >&2
        echo '/opt/predrain/bin/predrain to /usr/local/bin/predrain' >&2
        [ "$dry" ] || exit 1
        ;;
    esac
fi
changed=''
for unit in $units; do
    put "$here/systemd/predrain-$unit" "$root/etc/systemd/system/predrain-$unit" 644
done
put "$here/systemd/predrain.sysusers.conf" "$root/etc/sysusers.d/predrain.conf" 644
new=$changed
[ -e "$root/etc/predrain/predrain.env" ] || put "$here/systemd/predrain.env" "$root/etc/predrain/predrain.env" 644
if [ ! "$node" ] && [ ! -e "$root/etc/predrain/act.yaml" ]; then
    settings=$(mktemp)
    trap 'rm -f "$settings"' EXIT
    sed '/^# slurm:/,$s/^# //' "$here/act/act.yaml" >"$settings"
    put "$settings" "$root/etc/predrain/act.yaml" 644
fi
echo "installed:${changed:- nothing new}"
[ ! "$root" ] || exit 0

run systemd-sysusers predrain.conf
[ "$node" ] || run install -d -o predrain -g predrain -m 750 /var/lib/predrain \
    /var/lib/predrain/slurm /var/lib/predrain/tickets
run systemctl daemon-reload
for unit in $started; do
    case "$new " in *" predrain-$unit "*) run systemctl try-restart "predrain-$unit" ;; esac
    run systemctl enable --now "predrain-$unit"
done
[ "$node" ] || cat <<'END'
Next steps:
1. Set PREDRAIN_PROMETHEUS in /etc/predrain/predrain.env, or list exporters in /etc/predrain/targets.yaml and start
   predrain-exporters.
2. Copy ticket exports to /var/lib/predrain/tickets.
3. Give the user permission in Slurm: sacctmgr add user predrain account=root adminlevel=operator
The first run of predrain-retrain trains a model.
END
