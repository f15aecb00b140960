#!/bin/sh
# Runs a command that installs Debian packages, such that no service that they bring is started, now or at boot.
#
#     sh without_services.sh apt-get install --yes munge
#
# Services that were enabled before stay enabled. DPKG_ROOT names another root, as for dpkg's own tools.
set -eu
root=${DPKG_ROOT:-}
links() { find "$root/etc/systemd/system" "$root"/etc/rc[S2345].d -type l 2>/dev/null | sort; }
before=$(mktemp)
links >"$before"
policy=$root/usr/sbin/policy-rc.d
own_policy=
restore() {
    # What systemctl disable does; deb-systemd-helper(1p) then leaves the unit disabled when its package is upgraded.
    links | comm -13 "$before" - | while read -r link; do
        case $link in
        */rc?.d/S*) name=${link##*/S??} && update-rc.d "$name" disable ;;
        *) rm -f "$link" ;;
        esac
    done
    rm -f "$before"
    [ -z "$own_policy" ] || rm -f "$policy"
}
trap restore EXIT
# Packages call this script before starting their service (invoke-rc.d(8)); exit code 101 denies it.
if [ ! -e "$policy" ]; then
    own_policy=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
"$@"
