//! The example programs that need neither arguments nor another process run to their end.

#[path = "../../../target/disk/examples/disk_kind.rs"]
mod disk_kind;
#[path = "../../examples/embedded_target.rs"]
mod embedded_target;

#[test]
fn a_kind_of_disk_reads_and_refuses_a_write() {
    disk_kind::main();
}

#[test]
fn an_embedded_target_gives_back_what_its_host_wrote() {
    embedded_target::main().expect("it runs to its end");
}
