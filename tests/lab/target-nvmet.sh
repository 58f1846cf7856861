# The kernel's own target, made to follow the same configuration files: the cases are tried against it, so
# that what they demand is known to be what a Linux host and a working target do together. Not followed:
# [reactor], and whatever the cases do not use.
# shellcheck shell=bash

nvmet=/sys/kernel/config/nvmet
null_blk=/sys/kernel/config/nullb

target_modules() {
    modprobe -a nvmet nvmet-tcp "nvmet-$TRANSPORT" nvme-tcp "nvme-$TRANSPORT"
    modprobe null_blk nr_devices=0
    mountpoint -q /sys/kernel/config || mount -t configfs configfs /sys/kernel/config
}

declare -A settings counts

# Reads $CONFIG: settings[TABLE.NUMBER.KEY], and counts[TABLE]. A namespace gets the number of its subsystem
# besides. In bash, because a process costs 20 ms under emulation and this asks for hundreds of values.
read_config() {
    local line table='' key value
    settings=() counts=([disk]=0 [listener]=0 [subsystem]=0 [subsystem.namespace]=0)
    while read -r line; do
        case $line in
            '' | '#'*) ;;
            '['*)
                table=${line//[][]/}
                counts[$table]=$((${counts[$table]:-0} + 1))
                settings[$table.${counts[$table]}.parent]=${counts[subsystem]}
                ;;
            *)
                key=${line%% *} value=${line#*= }
                value=${value//[]['"']/}
                settings[$table.${counts[$table]}.$key]=${value//, /,}
                ;;
        esac
    done <"$CONFIG"
}

mebibytes() {
    case $1 in
        *MiB) echo "${1%MiB}" ;;
        *GiB) echo $((${1%GiB} << 10)) ;;
        *) fail "a size of '$1': these cases write MiB or GiB" ;;
    esac
}

# Sets disk_path of the named disk, which it makes, or makes larger.
apply_disk() {
    local i path size
    for ((i = 1; i <= counts[disk]; i++)); do
        [ "${settings[disk.$i.name]}" = "$1" ] || continue
        size=$(mebibytes "${settings[disk.$i.size]}")
        case ${settings[disk.$i.kind]} in
            ram)
                path=$null_blk/lab-$1
                disk_path=/dev/lab-$1
                [ ! -d "$path" ] || return 0
                mkdir "$path"
                echo "$size" >"$path/size"
                echo "${settings[disk.$i.block_bytes]:-512}" >"$path/blocksize"
                echo 1 >"$path/memory_backed"
                echo 1 >"$path/discard"
                echo 1 >"$path/power"
                ;;
            file)
                disk_path=${settings[disk.$i.path]}
                [ -b "$disk_path" ] || truncate -s "${size}M" "$disk_path"
                ;;
        esac
        return 0
    done
    fail "no disk $1 in $CONFIG"
}

apply_namespaces() {
    local subsystem=$1 number=$2 i nsid path wanted=' '
    for ((i = 1; i <= ${counts[subsystem.namespace]}; i++)); do
        [ "${settings[subsystem.namespace.$i.parent]}" = "$number" ] || continue
        nsid=${settings[subsystem.namespace.$i.nsid]}
        wanted+="$nsid "
        path=$subsystem/namespaces/$nsid
        apply_disk "${settings[subsystem.namespace.$i.disk]}"
        if [ -d "$path" ]; then
            echo 1 >"$path/revalidate_size"
            continue
        fi
        mkdir "$path"
        echo -n "$disk_path" >"$path/device_path"
        # The same after a restart, another for each namespace.
        printf '5b1d0000-0000-4000-8000-00000000%02x%02x' "$number" "$nsid" >"$path/device_uuid"
        echo 1 >"$path/enable"
    done
    for path in "$subsystem"/namespaces/*; do
        [ ! -d "$path" ] || [[ $wanted == *" ${path##*/} "* ]] || { echo 0 >"$path/enable"; rmdir "$path"; }
    done
}

apply_hosts() {
    local subsystem=$1 host
    local hosts=${settings[subsystem.$2.hosts]:-}
    [ "${settings[subsystem.$2.allow_any_host]}" = false ] || echo 1 >"$subsystem/attr_allow_any_host"
    for host in ${hosts//,/ }; do
        mkdir -p "$nvmet/hosts/$host"
        [ -e "$subsystem/allowed_hosts/$host" ] || ln -s "$nvmet/hosts/$host" "$subsystem/allowed_hosts/"
    done
}

target_apply() {
    local i nqn subsystem port address ports=()
    read_config
    for ((i = 1; i <= counts[listener]; i++)); do
        port=$nvmet/ports/$i
        ports+=("$port")
        [ ! -d "$port" ] || continue
        mkdir "$port"
        address=${settings[listener.$i.address]}
        echo "${settings[listener.$i.transport]:-tcp}" >"$port/addr_trtype"
        case $address in
            *:*:*) echo ipv6 ;;
            *) echo ipv4 ;;
        esac >"$port/addr_adrfam"
        echo "${address%:*}" >"$port/addr_traddr"
        echo "${address##*:}" >"$port/addr_trsvcid"
    done
    for ((i = 1; i <= counts[subsystem]; i++)); do
        nqn=${settings[subsystem.$i.nqn]}
        subsystem=$nvmet/subsystems/$nqn
        if [ ! -d "$subsystem" ]; then
            mkdir "$subsystem"
            echo "LAB$i" >"$subsystem/attr_serial"
        fi
        apply_hosts "$subsystem" "$i"
        apply_namespaces "$subsystem" "$i"
        for port in "${ports[@]}"; do
            [ -e "$port/subsystems/$nqn" ] || ln -s "$subsystem" "$port/subsystems/"
        done
    done
}

target_start() { target_modules; target_apply; }
target_reload() { target_apply; }

# Taking the subsystems off the ports drops their connections at once, which is the nearest it has to a kill.
target_kill() {
    local path
    for path in "$nvmet"/ports/*/subsystems/*; do [ ! -e "$path" ] || rm "$path"; done
    for path in "$nvmet"/ports/*; do [ ! -d "$path" ] || rmdir "$path"; done
}

target_stop() {
    local path
    [ -d "$nvmet" ] || return 0
    target_kill
    for path in "$nvmet"/subsystems/*/allowed_hosts/*; do [ ! -e "$path" ] || rm "$path"; done
    for path in "$nvmet"/subsystems/*/namespaces/* "$nvmet"/subsystems/* "$nvmet"/hosts/*; do
        [ ! -d "$path" ] || rmdir "$path"
    done
}

# Its RAM disks, which a restart keeps: called by the runner after each case.
target_forget() {
    local path
    for path in "$null_blk"/lab-*; do
        [ ! -d "$path" ] || rmdir "$path"
    done
}
