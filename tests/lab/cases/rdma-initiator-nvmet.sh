# our initiator against the kernel's own target over RDMA, whichever target the other cases have
# limit: 600 s
. "$LAB/initiator.sh"
. "$LAB/target-nvmet.sh"
expect_kernel_log 'nvmet(_rdma)?: '
config_initiator
start_target
initiator_checks
