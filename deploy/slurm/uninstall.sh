#!/bin/sh
# Takes predrain off this machine: first every mark off the nodes, then the units. Settings and data stay without --purge.
set -eu

usage='usage: uninstall.sh [--purge] [--leave-marks] [--root FOLDER] [--dry-run]
  --purge        also remove settings, data, ledger and models, and the user
  --leave-marks  go on where marks cannot be taken off: remove them by hand (docs/operating.md)
  --root         uninstall below this folder, and stop nothing
  --dry-run      print what would be done'
root='' dry='' purge='' leave=''
while [ $# -gt 0 ]; do
    case $1 in
    --purge) purge=1 ;;
    --leave-marks) leave=1 ;;
    --root) root=${2:?$usage} && shift ;;
    --dry-run) dry=1 ;;
    *) echo "$usage" >&2 && exit 2 ;;
    esac
    shift
done

run() {
    if [ "$dry" ]; then echo "would run: $*"; else "$@"; fi
}
act() { # as the unit does it, but for what goes with --loop
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
    while IFS= read -r line; do # not sourced: systemd's format is no shell's
        case $line in PREDRAIN_*=* | KUBECONFIG=* | SLURM_CONF=*) export "${line%%=*}=${line#*=}" ;; esac
    done <"$settings"
    if act --release-all --wait 10m; then
        act --resume || true # so that it may act when it is installed again
    else
        [ "$leave" ] || {
            echo 'uninstall.sh: some predrain markers remain, so nothing was removed. Where another host runs predrain act, stop it and' \
                'try again; or give --leave-marks.' >&2
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
