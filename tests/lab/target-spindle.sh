# The target under test, as lib.sh wants it.
# shellcheck shell=bash

target_log=$WORK/target.log

target_start() {
    "$SPINDLE" serve -c "$CONFIG" >>"$target_log" 2>&1 &
    target_pid=$!
}

target_is_gone() { ! kill -0 "$target_pid" 2>/dev/null; }

target_stop() {
    local code=0
    kill -TERM "$target_pid"
    # It has a deadline for draining; twice that, for the emulator.
    within 20 target_is_gone
    wait "$target_pid" || code=$?
    target_pid=''
    expect "the target's exit code after SIGTERM" "$code" 0
}

target_kill() {
    kill -KILL "$target_pid"
    wait "$target_pid" 2>/dev/null || true
    target_pid=''
}

target_reload() { kill -HUP "$target_pid"; }

# What it holds of the machine's memory, huge pages aside.
target_memory_kib() { awk '$1 == "VmRSS:" { print $2 }' "/proc/$target_pid/status"; }
