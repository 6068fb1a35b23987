#!/bin/sh
# Removes all markers of predrain from the nodes, then its units from this machine. --purge also removes settings and data.
set -eu

usage='usage: uninstall.sh [--purge] [--leave-markers] [--root FOLDER] [--dry-run]
  --purge          also remove settings, data, ledger, models and the user
  --leave-markers  continue if markers cannot be removed; remove them by hand (docs/operating.md)
  --root           uninstall below this folder, and stop nothing
  --dry-run        print the commands only'
root='' dry='' purge='' leave=''
while [ $# -gt 0 ]; do
    case $1 in
    --purge) purge=1 ;;
    --leave-markers) leave=1 ;;
    --root) root=${2:?$usage} && shift ;;
    --dry-run) dry=1 ;;
    *) echo "$usage" >&2 && exit 2 ;;
    esac
    shift
done

run() {
    if [ "$dry" ]; then echo "would run: $*"; else "$@"; fi
}
act() { # as in the unit, without --loop
    set -- --settings "$root/etc/predrain/act.yaml" --ledger "${PREDRAIN_LEDGER:-/var/lib/predrain/ledger.db}" "$@"
    # shellcheck disable=SC2086
    set -- predrain act --scheduler "${PREDRAIN_SCHEDULER:-slurm}" ${PREDRAIN_ACT_OPTIONS:-} "$@"
    if [ "$root" ]; then run "$@"; else run runuser -u predrain -- "$@"; fi
}

if [ ! "$root" ]; then
    [ "$dry" ] || [ "$(id -u)" = 0 ] || { echo 'uninstall.sh: run it as root' >&2; exit 1; }
    ! systemctl cat predrain-act.service >/dev/null 2>&1 || run systemctl disable --now predrain-act.service
fi
if [ -e "$root/etc/systemd/system/predrain-act.service" ] && [ -e "$root/etc/predrain/act.yaml" ]; then
    settings=$root/etc/predrain/predrain.env
    [ -e "$settings" ] || settings=/dev/null
    while IFS= read -r line; do # not sourced, because systemd's format is not shell
        case $line in PREDRAIN_*=* | KUBECONFIG=* | SLURM_CONF=*) export "${line%%=*}=${line#*=}" ;; esac
    done <"$settings"
    if act --release-all --wait 10m; then
        act --resume || true # so that a later installation can act
    else
        [ "$leave" ] || {
            echo 'uninstall.sh: nothing was uninstalled, because some predrain markers remain. If another host runs predrain act,' \
                'stop it and try again, or use --leave-markers.' >&2
            exit 1
        }
    fi
fi
for file in "$root"/etc/systemd/system/predrain-*.service "$root"/etc/systemd/system/predrain-*.timer; do
    [ -e "$file" ] || continue
    [ "$root" ] || run systemctl disable --now "${file##*/}"
    run rm "$file"
done
[ "$root" ] || run systemctl daemon-reload
run rm -f "$root/etc/sysusers.d/predrain.conf"
[ "$purge" ] || { echo "kept: $root/etc/predrain and $root/var/lib/predrain (--purge removes them)"; exit 0; }
run rm -rf "$root/etc/predrain" "$root/var/lib/predrain" "$root/var/cache/predrain" "$root"/etc/systemd/system/predrain-*.d
[ "$root" ] || ! id predrain >/dev/null 2>&1 || run userdel predrain
