# a host over TCP: connect, fio with verification, a file system, kill -9 of the target and reconnect
. "$LAB/smoke.sh"
smoke tcp
