# fio writes and verifies blocks of 512 B to 1 MiB at depth 1 and 32, with neither digest
# limit: 600 s
. "$LAB/fio-matrix.sh"
fio_matrix '0' '1 32'
