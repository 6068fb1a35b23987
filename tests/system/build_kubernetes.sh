#!/usr/bin/env bash
# Builds parts of a real Kubernetes control plane from Debian's own source package, for the system tests.
#
#   tests/system/build_kubernetes.sh [--keep] [COMPONENT ...]
#
# COMPONENT: kube-apiserver (the default), kube-scheduler, kube-controller-manager.
# --keep: leave the sources and Go's build cache where they are (gigabytes), so that a further component compiles faster.
#
# The binaries are kept in ${XDG_CACHE_HOME:-~/.cache}/predrain/kubernetes-VERSION/bin and are not built twice. That
# folder is the only line on standard output; what happens is told on standard error. Exits with 3 where the sources
# cannot be had, and with 1 on any other fault. Needs Debian (tried on 12), and
# root where one of the packages below is not installed yet. Nothing but Debian's own archive is used, and through
# the machine's own apt sources: the build itself runs with Go's downloads switched off.
set -euo pipefail

PACKAGES=(golang-go dpkg-dev etcd-server)
KNOWN=(kube-apiserver kube-scheduler kube-controller-manager)

say() { printf 'build_kubernetes: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }
# No fault of the code under test: this machine has no way to the sources.
impossible() { say "$*"; exit 3; }

KEEP=""
COMPONENTS=()
for argument in "$@"; do
  case "$argument" in
    --keep) KEEP=yes ;;
    -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *)
      [[ " ${KNOWN[*]} " == *" $argument "* ]] || fail "unknown component '$argument'; choose from: ${KNOWN[*]}"
      COMPONENTS+=("$argument")
      ;;
  esac
done
((${#COMPONENTS[@]})) || COMPONENTS=(kube-apiserver)

CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/predrain"
mkdir -p "$CACHE"
# A binary counts as built when it says the version that its folder is named after.
built() { # FOLDER COMPONENT
  local version="${1##*/kubernetes-}"
  [[ -x "$1/bin/$2" ]] && [[ "$("$1/bin/$2" --version 2>/dev/null)" == "Kubernetes v$version" ]]
}
all_built() { # FOLDER
  local component
  for component in "${COMPONENTS[@]}"; do built "$1" "$component" || return 1; done
}
use_built() { # leaves the script where everything is there
  local folder
  command -v etcd >/dev/null || return 0
  for folder in "$CACHE"/kubernetes-*; do
    if [[ -d "$folder" ]] && all_built "$folder"; then
      say "${COMPONENTS[*]} already in $folder/bin"
      printf '%s\n' "$folder/bin"
      exit 0
    fi
  done
}
use_built

exec 9>"$CACHE/.kubernetes.lock"
if ! flock --nonblock 9; then
  say "another build is running; waiting for it"
  flock 9
fi
use_built

# --- packages ---------------------------------------------------------------------------------------------------------
[[ -r /etc/os-release ]] && . /etc/os-release
[[ "${ID:-}" == debian ]] && command -v apt-get >/dev/null \
  || impossible "this is not Debian (${PRETTY_NAME:-unknown system}): the sources come from Debian's archive; run the system tests on Debian 12"
missing=()
for package in "${PACKAGES[@]}"; do
  [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || missing+=("$package")
done
if ((${#missing[@]})); then
  ((EUID == 0)) || fail "not root, and these packages are missing: run 'apt-get install --no-install-recommends ${missing[*]}' as root, then run again"
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq >&2
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi

use_built

# --- sources ----------------------------------------------------------------------------------------------------------
WORK="$CACHE/kubernetes-build"
mkdir -p "$WORK/apt/lists/partial" "$WORK/apt/sources" "$WORK/src"
rm -f "$WORK"/apt/sources/*
# The machine's own sources with "deb" turned into "deb-src"; other vendors' archives hold no Kubernetes and are left out.
CODENAME="${VERSION_CODENAME:?}"
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [[ -f "$list" ]] || continue
  sed -nE "/^deb(-src)?[[:space:]].*[[:space:]]${CODENAME}(-[a-z-]+)?[[:space:]].*\bmain\b/s/^deb(-src)?/deb-src/p" "$list" \
    >>"$WORK/apt/sources/predrain.list"
done
for list in /etc/apt/sources.list.d/*.sources; do
  [[ -f "$list" ]] || continue
  if grep -qE "^Suites:.*\b${CODENAME}\b" "$list"; then
    sed -E 's/^Types:.*/Types: deb-src/' "$list" >"$WORK/apt/sources/$(basename "$list")"
  fi
done
apt_options=(
  -o Dir::Etc::sourcelist=- -o "Dir::Etc::sourceparts=$WORK/apt/sources" -o "Dir::State::lists=$WORK/apt/lists"
  -o APT::Sandbox::User= -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache= -o APT::Get::List-Cleanup=0 -q
)
say "reading the list of Debian's source packages"
apt-get "${apt_options[@]}" update >"$WORK/apt.log" 2>&1 || { cat "$WORK/apt.log" >&2; impossible "apt cannot read the source packages"; }
debian="$(apt-cache "${apt_options[@]}" showsrc --only-source kubernetes 2>/dev/null | sed -n 's/^Version: //p' | sort -V | tail -1)"
[[ -n "$debian" ]] || impossible "Debian ${VERSION_ID:-?} has no source package 'kubernetes' in this machine's apt sources"
# 1.20.5+really1.20.2-1.1 is 1.20.2: "really" is how Debian goes back to an older upstream version.
version="${debian##*:}"
version="${version%-*}"
version="${version##*really}"
version="${version%%+*}"
FOLDER="$CACHE/kubernetes-$version"

cd "$WORK/src"
source_tree="$(find . -mindepth 1 -maxdepth 1 -type d -name 'kubernetes-*' -print -quit)"
if [[ ! -f "$source_tree/.unpacked-$version" ]]; then
  rm -rf "$WORK"/src/*
  say "fetching the source package kubernetes $debian"
  apt-get "${apt_options[@]}" source "kubernetes=$debian" >>"$WORK/apt.log" 2>&1 || { tail -20 "$WORK/apt.log" >&2; impossible "the source package could not be fetched"; }
  source_tree="$(find . -mindepth 1 -maxdepth 1 -type d -name 'kubernetes-*' -print -quit)"
  [[ -n "$source_tree" ]] || fail "the source package did not unpack"
  touch "$source_tree/.unpacked-$version"
fi
cd "$source_tree"

# --- build ------------------------------------------------------------------------------------------------------------
# Kubernetes' own make builds and runs every generator again, which takes longer than the components. All that the
# source package leaves to generate is the OpenAPI of the server's own types.
export GOPATH="$PWD/.go" GOCACHE="$WORK/gocache" HOME="$WORK" CGO_ENABLED=0 GOPROXY=off GOTOOLCHAIN=local GO111MODULE=off
unset GOROOT GOFLAGS
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export PWD="$GOPATH/src/k8s.io/kubernetes"  # go takes the import path of the folder from it
cd "$PWD"
generate() { # the types that ask for it by their tag
  local folders
  folders="$(grep -Rl --include='*.go' '+k8s:openapi-gen=' vendor/k8s.io pkg cmd plugin \
    | grep -Ev '^vendor/k8s.io/(code-generator|kube-openapi|sample-apiserver)/' | xargs -n1 dirname | LC_ALL=C sort -u \
    | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)"
  go build -o "$WORK/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  "$WORK/openapi-gen" --logtostderr -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r "$WORK/violations"
}
compile() { # without the clients of public clouds, which no test needs
  local major minor package flags="-s -w"
  IFS=. read -r major minor _ <<<"$version"
  # both: --version reports the one, and what the server answers to /version (which Helm reads) is the other
  for package in component-base/version client-go/pkg/version; do
    package="k8s.io/kubernetes/vendor/k8s.io/$package"
    flags+=" -X $package.gitVersion=v$version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
  done
  go build -tags=providerless -o "$WORK/bin/" -ldflags "$flags" "${COMPONENTS[@]/#/./cmd/}"
}
say "building ${COMPONENTS[*]} $version; some minutes on two cores (log: $WORK/build.log)"
SECONDS=0
mkdir -p "$WORK/bin"
{ generate && compile; } >"$WORK/build.log" 2>&1 9>&- || { tail -30 "$WORK/build.log" >&2; fail "the build failed; the whole log is $WORK/build.log"; }
say "built in ${SECONDS}s"

mkdir -p "$FOLDER/bin"
for component in "${COMPONENTS[@]}"; do
  install -m 0755 "$WORK/bin/$component" "$FOLDER/bin/.$component"
  mv -f "$FOLDER/bin/.$component" "$FOLDER/bin/$component"
  built "$FOLDER" "$component" || fail "$FOLDER/bin/$component does not say 'Kubernetes v$version'"
done
cd "$CACHE"
if [[ -z "$KEEP" ]]; then
  chmod -R u+w "$WORK"
  rm -rf "$WORK"
fi
say "${COMPONENTS[*]} $version in $FOLDER/bin"
printf '%s\n' "$FOLDER/bin"
