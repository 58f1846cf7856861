# no configuration file: the built-in disk is there, and the connect line that the start prints works as it is
skip_over rdma 'what is served without a configuration is served over TCP'
skip_on nvmet 'the kernel target has no configuration of its own'
"$SPINDLE" serve >"$WORK/target.log" 2>&1 &
target_pid=$!
within 30 is_listening
within 5 grep -q 'nvme connect ' "$WORK/target.log"
line=$(grep -o -m 1 'nvme connect [^"`'"'"']*' "$WORK/target.log")
echo "$line"
read -ra words <<<"$line"
"${words[@]}" || fail "this does not connect: $line"
find_controller() {
    local path
    for path in /sys/class/nvme/nvme*; do
        CTRL=${path##*/}
        [ ! -e "$path" ] || return 0
    done
    return 1
}
within 5 find_controller
within 10 has_state live
wait_for_block
expect 'the size' "$(block_bytes "$BLOCK")" $((1 << 30))
pattern "$WORK/data" 65536
write_blocks "$WORK/data" 0
read_blocks "$WORK/back" 0 65536
cmp "$WORK/data" "$WORK/back"
