# fio writes and verifies blocks of 512 B to 1 MiB at depth 32, with the data digest
# limit: 600 s
skip_over rdma 'digests are part of TCP: RDMA packets have a checksum of their own'
. "$LAB/fio-matrix.sh"
fio_matrix '0' 32 --data-digest
