#!/bin/sh
# Builds OpenPBS 23.06.06 for tests on a lab's nodes (Debian, Ubuntu): install_pbs.sh [FOLDER [REPOSITORY]].
# Nothing is started or enabled. The commit is the one that the tests were written against.
set -eu
folder=${1:-/opt/rankwise-pbs}
repository=${2:-https://github.com/openpbs/openpbs}
commit=cd7ab5edaf03dcac2f1cb9e2f42d75eb117d468a
[ ! -x "$folder/sbin/pbs_server" ] || { echo "$folder: OpenPBS is there"; exit 0; }
[ "$(id -u)" = 0 ] || { echo "root privileges required: sudo make pbs-install"; exit 1; }
command -v apt-get >/dev/null || { echo "apt-get not found. Install OpenPBS by other means and set OPENPBS to its folder"; exit 1; }
apt-get update -q
DEBIAN_FRONTEND=noninteractive sh "$(dirname "$0")/without_services.sh" apt-get install -q -y --no-install-recommends \
    gcc g++ make git ca-certificates libtool autoconf automake pkg-config swig perl python3-dev tcl-dev tk-dev \
    libhwloc-dev libx11-dev libxt-dev libxext-dev libxft-dev libedit-dev libical-dev libncurses-dev libexpat-dev \
    libssl-dev libpq-dev libcjson-dev zlib1g-dev postgresql postgresql-contrib postgresql-server-dev-all
sources=$(mktemp -d)
trap 'rm -rf "$sources"' EXIT
cd "$sources"
git init -q
git fetch -q --depth 1 "$repository" "$commit"
git checkout -q FETCH_HEAD
./autogen.sh
./configure --prefix="$folder" --with-pbs-server-home=/var/spool/rankwise-pbs --disable-ptl
make -j"$(nproc)" CFLAGS="-O1 -w -Wno-error"
make install
