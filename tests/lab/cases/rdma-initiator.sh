# our initiator against our target over RDMA: discover, bench with verification at several sizes and depths
# limit: 600 s
skip_on nvmet 'that is rdma-initiator-nvmet'
. "$LAB/initiator.sh"
config_initiator
start_target
initiator_checks
