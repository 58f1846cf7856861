//! libibverbs and librdmacm, as safe as they can be made. All `unsafe` of RDMA is here, and nothing else.
