#!/usr/bin/env bash
# Checks the native part against the real hipBLASLt, with no GPU: sets up a root folder of Debian's unstable
# suite, compiles the shim there with g++ and hipcc and the kernels with hipcc and hipRTC, and runs
# tests/native and the backend's own tests (pytest -m hip tests/backends/test_hipblaslt.py) on the stand-in HIP runtime
# (tests/hip_standin).
#
#   tools/check_hipblaslt.sh [--refresh] [ARGUMENTS FOR PYTEST]
#
# The root is kept under ${XDG_CACHE_HOME:-$HOME/.cache}/hipgroupgemm and named after the versions of its
# packages. Once a day (HIPGROUPGEMM_ROOT_MAX_AGE, in hours), or with --refresh, the mirror is asked whether
# there are others. All mounts are made in a namespace of this process, and end with it.
#
# If the mirror cannot serve the packages this prints NOT RUN and ends with status 0. Everything else that
# fails, fails.
#
#   HIPGROUPGEMM_MIRROR    a Debian mirror; default: the host's own, else debootstrap's
#   HIPGROUPGEMM_HEADERS   a folder with other hipBLASLt versions' public headers, VERSION/hipblaslt/*.h, to
#                          check the syntax against
set -euo pipefail

PACKAGES="libhipblaslt-dev libhipblas-common-dev libhipblaslt1 libamdhip64-dev libamdhip64-6 libhiprtc6 hipcc
  clang-21 g++ gcc make python3 python3-numpy python3-ml-dtypes python3-cffi python3-pytest python3-filelock
  python3-platformdirs python3-setuptools"
RECIPE=1 # raise it when what is done to the root changes

say() { printf 'check-hipblaslt: %s\n' "$*"; }
die() { say "$*" >&2; exit 1; }
not_run() {
  say "NOT RUN: $*"
  exit 0
}

# ---- inside the root ---------------------------------------------------------------------------------------

# step NAME INPUTS... -- COMMAND...: runs the command, unless it succeeded before with the same inputs.
step() {
  local name=$1 inputs=() key
  shift
  while [ "$1" != -- ]; do inputs+=("$1"); shift; done
  shift
  key=$({
    printf '%s\n' "$*"
    find "${inputs[@]}" -type f -print0 2> /dev/null | LC_ALL=C sort -z | xargs -0r sha256sum
  } | sha256sum)
  if [ -f "/build/done/$name" ] && [ "$key" = "$(cat "/build/done/$name")" ]; then
    say "$name: as before"
    return
  fi
  local start=$SECONDS status
  # Not "|| die": that would switch errexit off inside the command's functions too.
  set +e
  (set -e; "$@")
  status=$?
  set -e
  [ $status = 0 ] || die "$name failed (status $status): $*"
  mkdir -p /build/done
  printf '%s\n' "$key" > "/build/done/$name"
  say "$name: done in $((SECONDS - start)) s"
}

shim() { # FOLDER COMPILER EXTRA FLAGS
  CXX=$2 CXXFLAGS="-Werror ${3:-}" python3 setup.py -q build_native --folder "$1"
}

# The shim as a library of the next minor version would have it, to see that the difference is noticed.
mismatched_shim() {
  mkdir -p /build/mismatch/include/hipblaslt
  sed -E 's/(HIPBLASLT_VERSION_MINOR +)1/\12/' /usr/include/hipblaslt/hipblaslt-version.h \
    > /build/mismatch/include/hipblaslt/hipblaslt-version.h
  grep -Eq 'VERSION_MINOR +2' /build/mismatch/include/hipblaslt/hipblaslt-version.h \
    || die "hipBLASLt here is not 1.1 any more: see mismatched_shim, and the numbers in tests/native"
  shim /build/mismatch g++ "-O0 -isystem /build/mismatch/include"
}

headers_alone() {
  gcc -std=c11 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c include/hipgroupgemm.h
  g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c++ include/hipgroupgemm.h
}

other_versions() { # FOLDER
  local version source
  for version in "$1"/*/; do
    for source in hipgroupgemm/native/*.cpp; do
      g++ -std=c++17 -fsyntax-only -Wall -Wextra -Werror -D__HIP_PLATFORM_AMD__ -Iinclude \
        -isystem "$version" "$source"
    done
    say "syntax against $(basename "$version")'s headers: right (nothing of it was run)"
  done
}

kernels_hipcc() {
  local target source
  for target in gfx942 gfx950 gfx90a; do
    for source in kernels judge; do
      hipcc --genco --offload-arch="$target" -std=c++17 -O3 -Wall -Wextra -Werror -Idevice -Iinclude \
        "device/$source.cpp" -o "/build/$source-$target.co"
    done
  done
}

inside() {
  cd /src
  # shellcheck disable=SC2016
  say "$(dpkg-query -W -f '${Package} ${Version}; ' libhipblaslt1 libamdhip64-6 hipcc clang-21 g++ python3)"
  local native=(include setup.py hipgroupgemm/native/_build.py hipgroupgemm/native/_rocm.py
    hipgroupgemm/native/*.cpp hipgroupgemm/native/*.hpp hipgroupgemm/native/*.map)
  step header include -- headers_alone
  step shim-g++ "${native[@]}" -- shim /build/shim g++
  step shim-hipcc "${native[@]}" -- shim /build/shim-hipcc hipcc
  step shim-mismatch "${native[@]}" -- mismatched_shim
  if compgen -G '/headers/*/hipblaslt/hipblaslt-ext.hpp' > /dev/null; then
    step other-versions "${native[@]}" /headers -- other_versions /headers
  fi
  step stand-in tests/hip_standin -- make -s -j2 -C tests/hip_standin OUT=/build/standin
  export LD_LIBRARY_PATH=/build/standin HIPGROUPGEMM_STANDIN=1 PYTHONDONTWRITEBYTECODE=1
  export PYTHONPATH=/src:/opt/site
  if [ -f device/kernels.cpp ]; then
    step kernels-host device include tests/hip_standin -- \
      make -s -C tests/hip_standin OUT=/build/standin kernels
    step kernels-hipcc device include -- kernels_hipcc
    step kernels-hiprtc device include tools/hiprtc_kernels.py -- \
      python3 tools/hiprtc_kernels.py gfx942 gfx950 gfx90a
    export STANDIN_KERNELS=/build/standin/libdevice_kernels.so
  else
    say "device/kernels.cpp is not in this checkout: kernels not checked"
  fi
  export HIPGROUPGEMM_MISMATCH=/build/mismatch/libhipgroupgemm.so
  # The other compiler's shim must work as well; the tests proper use g++'s.
  HIPGROUPGEMM_NATIVE_LIBRARY=/build/shim-hipcc/libhipgroupgemm.so python3 -m pytest -q -p no:cacheprovider \
    tests/native/test_native_order.py -k "destroy or runs_only" --no-header
  HIPGROUPGEMM_NATIVE_LIBRARY=/build/shim/libhipgroupgemm.so python3 -m pytest -p no:cacheprovider \
    --no-header tests/native "$@"
  # From Python to records: the whole backend through hip-python, where its wheels could be had.
  if [ -f /opt/site/.done ]; then
    HIPGROUPGEMM_NATIVE_LIBRARY=/build/shim/libhipgroupgemm.so HIPGROUPGEMM_CACHE_DIR=/build/cache \
      python3 -m pytest -p no:cacheprovider --no-header -m hip tests/backends/test_hipblaslt.py
  fi
}

if [ "${1:-}" = --inside ]; then
  shift
  inside "$@"
  exit
fi

# ---- outside -----------------------------------------------------------------------------------------------

refresh=0
if [ "${1:-}" = --refresh ]; then
  refresh=1
  shift
fi
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/hipgroupgemm
max_age=${HIPGROUPGEMM_ROOT_MAX_AGE:-24}

[ "$(id -u)" = 0 ] || die "needs root (for debootstrap, chroot and mounts)"
command -v unshare > /dev/null || die "needs unshare (util-linux)"
command -v apt-get > /dev/null || die "needs apt-get and debootstrap, that is Debian or a relative of it"
if ! command -v debootstrap > /dev/null; then
  say "installing debootstrap"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y debootstrap > /dev/null; } \
    || not_run "debootstrap is missing and cannot be installed"
fi
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f $keyring ] || die "needs $keyring (package debian-archive-keyring)"

mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9

mirror=${HIPGROUPGEMM_MIRROR:-}
if [ -z "$mirror" ] && grep -qs '^ID=debian' /etc/os-release; then
  # shellcheck disable=SC2016
  mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2> /dev/null \
    | grep -m1 '/debian/\?$' || true)
fi
if [ -z "$mirror" ]; then
  mirror=$(sed -n 's/^ *DEF_MIRROR="\(http[^"]*\)".*/\1/p' "$(command -v debootstrap)" | head -1)
fi
[ -n "$mirror" ] || die "which Debian mirror? Set HIPGROUPGEMM_MIRROR"

# A mirror frozen at some date has an index past its Valid-Until. Its signature is checked all the same.
tolerant=(-o Acquire::Check-Valid-Until=false -o Acquire::Retries=3 -o Acquire::http::Timeout=60)

# The versions that the mirror has, asked without touching the host's own lists.
newest_versions() {
  local apt=$cache/apt options
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
  printf 'deb [signed-by=%s] %s sid main\n' "$keyring" "$mirror" > "$apt/sources.list"
  options=("${tolerant[@]}" -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$apt/lists" -o Dir::Cache="$apt/cache" -o Dir::Etc::Preferences=/dev/null
    -o Dir::Etc::PreferencesParts=/dev/null -o Acquire::Languages=none -o APT::Sandbox::User=root)
  apt-get -qq "${options[@]}" update > "$apt/log" 2>&1 || return 1
  # shellcheck disable=SC2086
  apt-cache "${options[@]}" -o Dir::State::status=/dev/null show --no-all-versions $PACKAGES 2>> "$apt/log" \
    | awk '/^Package:/ { name = $2 } /^Version:/ { print name, $2 }' | LC_ALL=C sort
}

in_root() { # ROOT COMMAND...: with /proc and /dev, in a mount namespace that ends with the command
  # shellcheck disable=SC2016
  unshare --mount --propagation private -- bash -euc '
    root=$1; shift
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 TERM=dumb DEBIAN_FRONTEND=noninteractive \
      PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"' _ "$@"
}

make_root() { # ROOT
  local part=$1.part
  rm -rf "$part"
  say "setting up $1 from $mirror"
  debootstrap --variant=minbase --download-only sid "$part" "$mirror" > "$cache/debootstrap.log" 2>&1 \
    || not_run "the mirror $mirror cannot serve Debian unstable (see $cache/debootstrap.log)"
  debootstrap --variant=minbase sid "$part" "$mirror" >> "$cache/debootstrap.log" 2>&1 \
    || die "debootstrap failed, see $cache/debootstrap.log"
  printf 'Acquire::Check-Valid-Until "false";\nAcquire::Retries "3";\nAPT::Install-Recommends "false";\n' \
    > "$part/etc/apt/apt.conf.d/90hipgroupgemm"
  printf '#!/bin/sh\nexit 101\n' > "$part/usr/sbin/policy-rc.d" # no service is started
  chmod +x "$part/usr/sbin/policy-rc.d"
  cp -L /etc/resolv.conf "$part/etc/resolv.conf" 2> /dev/null || true
  # shellcheck disable=SC2086
  { in_root "$part" apt-get -qq update \
    && in_root "$part" apt-get -qq install -y --download-only $PACKAGES; } \
    > "$cache/install.log" 2>&1 \
    || not_run "the mirror $mirror cannot serve the packages (see $cache/install.log)"
  # shellcheck disable=SC2086
  in_root "$part" apt-get -qq install -y $PACKAGES >> "$cache/install.log" 2>&1 \
    || die "the packages cannot be installed, see $cache/install.log"
  in_root "$part" apt-get clean
  mkdir -p "$part/src" "$part/build"
  mv "$part" "$1"
}

# hip-python for the root's own Python, which Debian has no package of.
add_hip_python() { # ROOT
  [ ! -f "$1/opt/site/.done" ] || return 0
  local version
  version=$(in_root "$1" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  rm -rf "$1/opt/site"
  if python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps \
    --only-binary=:all: --python-version "$version" --target "$1/opt/site" \
    'rocm-bindings-hip==10.*' 'rocm-bindings-core==10.*' > "$cache/pip.log" 2>&1; then
    touch "$1/opt/site/.done"
  else
    rm -rf "$1/opt/site"
    say "NOT RUN: tests that use hip-python; its wheels for Python $version cannot be had (see $cache/pip.log)"
  fi
}

current=$(cat "$cache/current" 2> /dev/null || true)
fresh=0
if [ -n "$current" ] && [ -d "$cache/$current" ]; then
  [ -n "$(find "$cache/current" -mmin "-$((max_age * 60))")" ] && fresh=1
else
  current=
fi
if [ $fresh = 0 ] || [ $refresh = 1 ]; then
  if versions=$(newest_versions) && [ "$(wc -l <<< "$versions")" -ge "$(wc -w <<< "$PACKAGES")" ]; then
    wanted=unstable-$({ echo "$RECIPE"; echo "$versions"; } | sha256sum | cut -c1-12)
    if [ "$wanted" != "$current" ]; then
      [ -d "$cache/$wanted" ] || make_root "$cache/$wanted"
      current=$wanted
      for old in "$cache"/unstable-*; do [ "$old" = "$cache/$current" ] || rm -rf "$old"; done
    fi
    echo "$current" > "$cache/current"
  elif [ -n "$current" ]; then
    say "the mirror $mirror does not answer; going on with the root that is here"
  else
    not_run "the mirror $mirror cannot serve $(tr -s ' \n' ' ' <<< "$PACKAGES")(see $cache/apt/log)"
  fi
fi

root=$cache/$current
say "root $root"
add_hip_python "$root"
# shellcheck disable=SC2016
unshare --mount --propagation private -- bash -euc '
  root=$1 source=$2 headers=$3; shift 3
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --bind "$source" "$root/src"
  mount -o remount,bind,ro "$root/src"
  if [ -n "$headers" ]; then mkdir -p "$root/headers"; mount --bind "$headers" "$root/headers"; fi
  exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" CI="${CI:-}" \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    bash /src/tools/check_hipblaslt.sh --inside "$@"' \
  _ "$root" "$source" "${HIPGROUPGEMM_HEADERS:-}" "$@"
