# reloads under fio: subsystems and namespaces come and go, and the connection over RDMA does not notice
lines_with() { reactor; disk_ram d0 64MiB; disk_ram d1 32MiB; listener; subsystem "$NQN" d0 "${@:2}"; $1; }
more() { subsystem "$NQN1" d1; }
lines_with true | config
start_target
connect_block
run=(--bs=4k --size=8M --iodepth=16 --rate_iops=500)
verify_fio reloaded "${run[@]}" &
fio=$!
lists() { nvme discover "${PORTAL[@]}" "${HOST_A[@]}" | grep -E "subnqn: +$NQN1\$" >/dev/null; }
under_way "$fio"
lines_with more | config
reload_target
within 20 lists
lines_with true d1 | config
reload_target
within 20 find_block 2
wait "$fio"
has_state live || fail 'the connection did not stay'
if dmesg | grep -E 'starting error recovery|Reconnecting'; then fail 'the connection was lost in between'; fi
# The listener goes over to all addresses and back: new hosts are heard, and the connection stays.
discovers() { nvme discover "${PORTAL[@]}" "${HOST_A[@]}" >"$WORK/discovered" 2>&1; }
heard_at() { [ "$(grep -cF "listening (NVMe/RDMA, discovery included) address=$1" "$target_log")" = "$2" ]; }
at() { { reactor; disk_ram d0 64MiB; disk_ram d1 32MiB; listener "$1"; subsystem "$NQN" d0 d1; } | config; }
[ "$TARGET_KIND" != nvmet ] || exit 0
at "0.0.0.0:$PORT"
reload_target
within 20 heard_at "0.0.0.0:$PORT" 1
discovers || fail "not heard at all addresses: $(<"$WORK/discovered")"
at "$ADDRESS:$PORT"
reload_target
within 20 heard_at "$ADDRESS:$PORT" 2
discovers || fail "not heard at its address: $(<"$WORK/discovered")"
has_state live || fail 'the connection did not stay'
read_blocks "$WORK/back" 0 65536
