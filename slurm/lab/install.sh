#!/bin/sh
# Installs the packages for a lab (Debian, Ubuntu). A lab runs its own daemons: no service is started or enabled at boot.
set -eu
missing=
for each in slurmctld slurmd slurmdbd sacctmgr munged mariadbd mariadb-install-db ip tc nsenter unshare setsid taskset sshd ssh-keygen; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$each" >/dev/null || missing="$missing $each"
done
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "root privileges required: sudo make lab-install"; exit 1; }
command -v apt-get >/dev/null || { echo "apt-get not found. Install Slurm with slurmdbd, munge, MariaDB, OpenSSH and iproute2 by other means"; exit 1; }
apt-get update -q
DEBIAN_FRONTEND=noninteractive sh "$(dirname "$0")/without_services.sh" apt-get install -q -y --no-install-recommends \
    slurmctld slurmd slurmdbd slurm-client munge mariadb-server iproute2 util-linux openssh-server openssh-client
