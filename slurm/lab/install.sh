#!/bin/sh
# Installs what a lab needs (Debian, Ubuntu) and starts none of it: a lab brings up daemons of its own.
set -eu
missing=
for each in slurmctld slurmd slurmdbd sacctmgr munged mariadbd mariadb-install-db ip tc nsenter unshare setsid taskset; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$each" >/dev/null || missing="$missing $each"
done
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "installing packages needs root rights: sudo make lab-install"; exit 1; }
command -v apt-get >/dev/null || { echo "this installs with apt-get; elsewhere install Slurm with slurmdbd, munge, MariaDB, iproute2"; exit 1; }
# Packages ask this script whether they may start their service (invoke-rc.d(8)); 101 says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
    slurmctld slurmd slurmdbd slurm-client munge mariadb-server iproute2 util-linux
