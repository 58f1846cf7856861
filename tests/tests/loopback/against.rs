//! `spindle bench --against`, two subsystems by turns.

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use spindle_tests::loopback::{Folder, SUBSYSTEM, binary, config, free_port};

use super::{RAM, V4};

const NQN: &str = "nqn.2026-01.io.spindle:other";

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.arg("bench").args(arguments).stdin(Stdio::null()).output().expect("spindle starts")
}

#[test]
fn two_subsystems_are_compared_in_one_run() {
    let address = free_port(V4);
    let folder = Folder::new("against");
    let other = format!(
        "[[disk]]\nname = \"other\"\nkind = \"ram\"\nsize = \"1MiB\"\n[[subsystem]]\nnqn = \"{NQN}\"\n\
         allow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\ndisk = \"other\"\n"
    );
    let served = folder.serve(&(config(1, address, &[RAM.to_owned()]) + &other));
    let address = address.to_string();
    let compare = |options: &[&str]| {
        let two = [&address, "--nqn", SUBSYSTEM, "--against", NQN, "--seconds", "0.12"];
        bench(&[&two[..], options].concat())
    };
    for options in ["--rw read --bs 64KiB --qd 4", "--rw randwrite --qd 8 --queues 2", "--rw randrw --qd 1"] {
        let output = compare(&[&options.split(' ').collect::<Vec<_>>()[..], &["--json"]].concat());
        assert!(output.status.success(), "{options}: {}", String::from_utf8_lossy(&output.stderr));
        let result: Value = serde_json::from_slice(&output.stdout).expect("one object");
        let against = &result["against"];
        assert_eq!((&result["run"]["nqn"], &against["run"]["nqn"]), (&SUBSYSTEM.into(), &NQN.into()));
        assert_eq!((&result["errors"], &against["errors"]), (&0.into(), &0.into()));
        // The smaller namespace decides.
        assert_eq!((&result["run"]["span"], &against["run"]["span"]), (&(1 << 20).into(), &(1 << 20).into()));
        for rate in [&result["iops"], &against["iops"], &result["iops_ratio"]] {
            assert!(rate.as_f64().is_some_and(|rate| rate > 0.0), "{options}: {result}");
        }
    }
    let output = compare(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("against") && text.contains(&format!("IOPS over those of {NQN}: ")), "{text}");
    for (options, part) in [
        (&["--bare"][..], "cannot be used with"),
        (&["--verify"], "cannot be used with"),
        (&["--span", "2MiB"], "the namespace has 1 MiB"),
    ] {
        let output = compare(options);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{options:?}: {output:?}");
        assert!(message.contains(part), "{part} in: {message}");
    }
    let output = bench(&[&address, "--nqn", SUBSYSTEM, "--against", "nqn.2026-01.io.spindle:none"]);
    assert!(!output.status.success(), "{output:?}");
    let output = bench(&[&address, "--against", NQN]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--nqn"), "{output:?}");
    served.terminate();
}
