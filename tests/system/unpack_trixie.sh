#!/usr/bin/env bash
# Unpacks Slurm and Prometheus of Debian 13 (trixie) beside those of this machine, for the system tests.
#
# Prints the folder, ${XDG_CACHE_HOME:-~/.cache}/predrain/trixie-SCRIPT-VERSIONS, where each program of its bin/ runs with
# the release's own /usr, in a mount namespace of its own. SCRIPT is the digest of this file, which lists the packages. Nothing is installed. The packages come through the machine's own
# apt sources and are verified by the machine's Debian keys. Exits with 3 where they cannot be had or run. Remove the
# folder for newer versions.
set -euo pipefail

PACKAGES=(slurmctld slurmd slurm-client slurmrestd slurmdbd slurm-wlm-jwt-plugin slurm-wlm-mysql-plugin prometheus bash
  coreutils dash util-linux)
PROGRAMS=(slurmctld slurmd slurmrestd slurmdbd scontrol sinfo squeue sbatch scancel sacct sacctmgr prometheus)
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

impossible() { printf 'unpack_trixie: %s\n' "$*" >&2; exit 3; }

command -v apt-get >/dev/null && [[ -r $KEYS ]] || impossible "no apt with Debian's keys"
((EUID == 0)) && unshare --mount true 2>/dev/null || impossible "only root can mount the release's /usr"

cache="${XDG_CACHE_HOME:-$HOME/.cache}/predrain"
work="$cache/trixie-apt"
digest="$(sha256sum "${BASH_SOURCE[0]}" | cut -c1-8)"
mkdir -p "$cache"
exec 9>"$cache/.trixie.lock"
flock --timeout 600 9 || impossible "another process has been unpacking for 10 minutes"
for unpacked in "$cache/trixie-$digest-"*/bin; do
  if [[ -d $unpacked ]]; then
    dirname "$unpacked"
    exit 0
  fi
done

rm -rf "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# The machine's own mirror of Debian: the address before /dists/ of its own release.
codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
mirror="$(apt-get update --print-uris 2>/dev/null | sed -n "s|^'\(.*\)/dists/$codename/InRelease'.*|\1|p" | head -1)"
[[ -n $mirror ]] || impossible "no mirror of Debian in the apt sources"
echo "deb [signed-by=$KEYS] $mirror trixie main" >"$work/sources.list"
: >"$work/status"
run_apt() {
  timeout 300 apt-get -q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- -o APT::Sandbox::User= \
    -o Dir::Etc::preferencesparts=- -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \
    -o Dir::Cache="$work/cache" -o Acquire::Retries=2 "$@" >>"$work/apt.log" 2>&1 9>&- \
    || { tail -5 "$work/apt.log" >&2; impossible "the packages of trixie cannot be had from this machine's mirror"; }
}
run_apt -o APT::Update::Error-Mode=any update
run_apt install --yes --no-install-recommends --download-only "${PACKAGES[@]}"

archives=("$work"/cache/archives/*.deb)
version_of() { basename "$work"/cache/archives/"$1"_* | cut -d_ -f2 | sed 's/%3a/:/'; }
root="$cache/trixie-$digest-$(version_of slurmctld)-$(version_of prometheus)"
making="$work/made"
rm -rf "$making"
mkdir -p "$making/bin" "$making/tree"
for archive in "${archives[@]}"; do
  case "${archive##*/}" in promtool_* | libjs-* | fonts-*) continue ;; esac
  dpkg-deb --fsys-tarfile "$archive" | tar -x -C "$making/tree" --exclude='./usr/share/*'
done
for program in slurmctld slurmd slurmstepd; do ln -s "$program-wlm" "$making/tree/usr/sbin/$program"; done
cat >"$making/enter" <<'RUN'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")
exec unshare --mount env PATH=/usr/sbin:/usr/bin \
  sh -c 'mount --bind "$0/tree/usr" /usr && exec "$@"' "$root" "$(basename "$0")" "$@"
RUN
chmod +x "$making/enter"
for program in "${PROGRAMS[@]}"; do ln -s ../enter "$making/bin/$program"; done
"$making/bin/slurmctld" -V >&2 || impossible "its programs do not run here"
mv "$making" "$root"
rm -rf "$work"
echo "$root"
