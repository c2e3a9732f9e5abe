#!/usr/bin/env bash
# Installs the Debian/Ubuntu packages the build needs, if any is missing.
#   tools/install_dependencies.sh          to build, run and test
#   tools/install_dependencies.sh --dev    and for sanitizers, fuzzing, the linter, tools/fetch_cutlass.sh and
#                                          tools/test_python.sh
set -euo pipefail

packages=(g++ cmake ninja-build make libfmt-dev nlohmann-json3-dev libcli11-dev libgtest-dev)
dev_packages=(clang clang-format clang-tidy libomp-dev libclang-rt-dev python3)
# A Python from elsewhere does as well, if it has these parts; Debian's packages are for Debian's Python alone.
python3 -m pip --version >/dev/null 2>&1 || dev_packages+=(python3-pip)
python3 -c "import ensurepip" 2>/dev/null || dev_packages+=(python3-venv)
python3 -c "import os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')" 2>/dev/null ||
  dev_packages+=(python3-dev)
case "${1:-}" in
  "") ;;
  --dev) packages+=("${dev_packages[@]}") ;;
  *) echo "usage: $0 [--dev]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "This is not Debian or Ubuntu; please install what these packages hold: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "== All needed packages are installed"
  exit 0
fi

echo "== Installing ${missing[*]}"
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "Please install as root: apt-get install ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
