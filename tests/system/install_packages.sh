#!/usr/bin/env bash
# The real servers that the system tests start, from Debian's packages. Does nothing where all are there.
set -euo pipefail

PACKAGES=(gcc make libc6-dev prometheus victoria-metrics munge slurmctld slurmd slurm-client slurmrestd slurmdbd slurm-wlm-jwt-plugin
  slurm-wlm-mysql-plugin mariadb-server-core etcd-server golang-go dpkg-dev chromium fonts-dejavu-core buildah mmdebstrap)

missing=()
for package in "${PACKAGES[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
  echo "make test-system starts real servers and needs these Debian packages, which root can install with:" >&2
  echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
# The tests start their own servers on their own ports: the packages' services must not run.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
