# a host over RDMA: connect, fio with verification, a file system, kill -9 of the target and reconnect
. "$LAB/smoke.sh"
smoke rdma
