//! `spindle check`: validates a configuration and prints what it starts, its memory use, and the commands
//! with which hosts connect. It binds no listener. Of files and devices it reads only size and identity.
//!
//! With `--against` it also prints what a reload would change in a target that serves another file. With
//! `--reference` it only prints the reference of all keys.

use std::fmt::Write as _;
use std::path::Path;

use comfy_table::{CellAlignment, Table};
use spindle_nvme_initiator::Target;
use spindle_reactor::run::Idle;
use spindle_target_disk::medium_id;
use uuid::Uuid;

use crate::cli::CheckArgs;
use crate::config::{
    AllocationPhase, Change, Config, ConfigErrors, DiskKind, DiskPlan, Hosts, LogFormat, Plan, SubsystemPlan,
    cache_text, connect_line, delay_text, memory_items, reachable_address, reference, total_bytes,
};
use crate::size::{Bytes, rounded};
use crate::text::table;
use spindle_app_bench::say;

/// # Errors
/// Errors of the file, or of the file of `--against`.
pub fn run(args: &CheckArgs) -> Result<(), ConfigErrors> {
    let Some(file) = &args.config else {
        say!("{}", reference().trim_end());
        return Ok(());
    };
    let config = Config::examine(file)?;
    let mut text = format!("{} is valid.\n\n{}", file.display(), describe(config.plan()));
    if let Some(against) = &args.against {
        let running = Config::examine(against)?;
        text.push_str(&describe_changes(against, &config.plan().changes(running.plan())));
    }
    say!("{}", text.trim_end());
    Ok(())
}

fn describe(plan: &Plan) -> String {
    let mut text = String::from("What starts\n");
    let cores: Vec<String> = plan.reactor.cores.iter().map(usize::to_string).collect();
    let pinned = if plan.reactor.is_pinned { "pinned" } else { "not pinned" };
    let idle = match plan.reactor.idle {
        Idle::Spin => "polling always".to_owned(),
        Idle::SleepAfter(time) => format!("polling, asleep after {} us without work", time.as_us()),
    };
    let _ = writeln!(text, "  cores       {}, {pinned}, {idle}", cores.join(", "));
    for listener in &plan.listeners {
        let bytes = Bytes::new(listener.in_capsule_bytes.into());
        let transport = listener.transport.to_string().to_uppercase();
        let _ = writeln!(text, "  listener    NVMe/{transport} {}, {bytes} in capsule", listener.address);
    }
    for disk in &plan.disks {
        let _ = writeln!(text, "  disk        {}", describe_disk(disk));
        if let Some(id) = medium_id_of(disk) {
            let _ = writeln!(text, "              medium_id = {id:?}");
        }
    }
    for subsystem in &plan.subsystems {
        describe_subsystem(&mut text, plan, subsystem);
    }
    for referral in &plan.referrals {
        let _ = writeln!(text, "  referral    {}", referral.address);
    }
    let format = if plan.log.format == LogFormat::Json { "JSON" } else { "text" };
    let _ = writeln!(
        text,
        "  log         {} and more urgent, {format}, to standard error",
        plan.log.level.as_str().to_lowercase()
    );
    let _ = writeln!(text, "  shutdown    within {} ms", plan.drain_deadline.as_millis());
    let _ = write!(text, "\nMemory\n{}\n", memory_table(plan));
    text.push_str(&host_lines(plan));
    if !plan.notes.is_empty() {
        text.push_str("\nPlease note\n");
    }
    for note in &plan.notes {
        let _ = writeln!(text, "  - {note}");
    }
    text
}

/// Returns the name of the medium at the path of a `file` or `ng` disk. For other kinds returns the
/// configured `medium_id`, since their name is known only once the disk is open.
fn medium_id_of(disk: &DiskPlan) -> Option<String> {
    if let DiskKind::File { path, .. } | DiskKind::Ng { path, .. } = &disk.kind {
        return medium_id::at(path).ok()?.into_iter().next();
    }
    disk.medium_id.clone()
}

fn describe_disk(disk: &DiskPlan) -> String {
    let cache = disk.cache.map(|cache| format!(", cache {}", cache_text(Some(&cache))));
    let delay = disk.delay.map(|delay| format!(", slow on purpose: {}", delay_text(Some(&delay))));
    format!("{}{}{}", describe_uncached(disk), delay.unwrap_or_default(), cache.unwrap_or_default())
}

fn describe_uncached(disk: &DiskPlan) -> String {
    let (name, kind, bytes) = (&disk.name, disk.kind.name(), Bytes::new(disk.bytes));
    if let DiskKind::Nvme { address, namespace } = &disk.kind {
        return format!("{name}: {kind}, drive at {address}, namespace {namespace}");
    }
    if let DiskKind::Remote { target, namespace, .. } = &disk.kind {
        let Target { transport, address, nqn, host } = &**target;
        let host = host.nqn;
        return format!("{name}: {kind}, namespace {namespace} of {nqn} at {transport}:{address}, as {host}");
    }
    if let DiskKind::Ng { path, is_read_only } = &disk.kind {
        let about = if *is_read_only { ", read-only" } else { "" };
        return format!("{name}: {kind}, {}{about}", path.display());
    }
    let mut text = format!("{name}: {kind}, {bytes}, blocks of {} bytes", disk.block_bytes);
    if let DiskKind::File { path, is_read_only, create, is_direct, is_polled } = &disk.kind {
        let _ = write!(text, ", {}", path.display());
        let about = [
            (*is_read_only, "read-only"),
            (*create, "made if missing"),
            (!*is_direct, "through the page cache"),
            (*is_polled, "polled"),
        ];
        for (_, words) in about.into_iter().filter(|(is_so, _)| *is_so) {
            let _ = write!(text, ", {words}");
        }
    }
    text
}

fn describe_subsystem(text: &mut String, plan: &Plan, subsystem: &SubsystemPlan) {
    let _ = writeln!(text, "  subsystem   {}", subsystem.nqn);
    let (serial, model) = (&subsystem.serial, &subsystem.model);
    let _ =
        writeln!(text, "              serial {serial}, model {model}, hosts: {}", Hosts(&subsystem.hosts));
    let offered: Vec<String> =
        plan.listeners_of(subsystem).map(|listener| listener.address.to_string()).collect();
    let _ = writeln!(text, "              at {}", offered.join(", "));
    for namespace in &subsystem.namespaces {
        let is_remote = plan.disk(&namespace.disk).is_some_and(|disk| disk.kind.name() == "remote");
        let of = if is_remote { "derived from the far namespace's" } else { "made with the disk" };
        let made = || of.to_owned();
        let uuid = namespace.uuid.map_or_else(made, |uuid| Uuid::from_bytes(uuid).to_string());
        let nguid = namespace.nguid.map_or_else(made, |nguid| format!("{:032x}", u128::from_be_bytes(nguid)));
        let _ = writeln!(text, "    namespace {}: disk {}", namespace.nsid, namespace.disk);
        let _ = writeln!(text, "              uuid {uuid}, nguid {nguid}");
    }
}

fn memory_table(plan: &Plan) -> Table {
    let mut table = table(["what for", "each", "count", "at most", "taken"]);
    for column in table.column_iter_mut().skip(1).take(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let items = memory_items(plan);
    for item in &items {
        let from = if item.is_huge { ", huge pages" } else { "" };
        let when = format!("{}{from}", item.phase.label());
        let (each, all) = (rounded(item.each), rounded(item.bytes()));
        table.add_row([item.reason(), each, item.count.to_string(), all, when]);
    }
    for (words, when) in [
        ("sum at the start", AllocationPhase::Start),
        ("sum with full RAM disks", AllocationPhase::Filled),
        ("sum with all connections", AllocationPhase::Busy),
    ] {
        table.add_row([words, "", "", &rounded(total_bytes(&items, when)), ""]);
    }
    table
}

fn host_lines(plan: &Plan) -> String {
    let mut text = String::from("\nWhat hosts type\n");
    for listener in &plan.listeners {
        let (transport, address) = (listener.transport, reachable_address(listener.address));
        let _ = writeln!(text, "  nvme discover -t {transport} -a {} -s {}", address.ip(), address.port());
    }
    for subsystem in &plan.subsystems {
        for listener in plan.listeners_of(subsystem) {
            let _ = writeln!(text, "  {}", connect_line(listener.endpoint(), &subsystem.nqn));
        }
    }
    text
}

fn describe_changes(against: &Path, changes: &[Change]) -> String {
    let mut text = format!("\nA reload from {}, with all of its disks open\n", against.display());
    for change in changes {
        let _ = writeln!(text, "  - {change}");
    }
    if changes.is_empty() {
        text.push_str("  changes nothing\n");
    }
    if changes.iter().any(Change::is_refused) {
        text.push_str("  would be refused as a whole\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use spindle_reactor::clock::Nanos;
    use spindle_target_disk::DelaySpec;

    use std::sync::Arc;

    use super::*;

    #[test]
    fn what_starts_what_it_takes_and_what_hosts_type_is_printed() {
        let text = describe(Config::builtin().plan());
        for part in [
            "listener    NVMe/TCP 127.0.0.1:4420, 4 KiB in capsule",
            "disk        ram0: ram, 1 GiB, blocks of 512 bytes",
            "subsystem   nqn.2026-01.io.spindle:default",
            "serial SPDLECC6CFDC70095C25, model Spindle, hosts: any",
            "uuid made with the disk, nguid made with the disk",
            "pool: 1024 buffers of 4 KiB, a core",
            "admin reserve",
            "sum with full RAM disks",
            "\n  nvme discover -t tcp -a 127.0.0.1 -s 4420\n",
            "\n  nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.io.spindle:default\n",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn a_disk_is_printed_with_what_makes_it_slow() {
        let mut plan = Config::builtin().plan().clone();
        let (latency, seek) = (Nanos::from_us(7), Nanos::ZERO);
        Arc::make_mut(&mut plan.disks[0]).delay = Some(DelaySpec { latency, bandwidth: Some(1 << 20), seek });
        let text = describe(&plan);
        let part = "blocks of 512 bytes, slow on purpose: latency 7 us, bandwidth 1 MiB/s\n";
        assert!(text.contains(part), "{text}");
    }

    #[test]
    fn a_listener_is_printed_with_its_transport() {
        let mut plan = Config::builtin().plan().clone();
        plan.listeners[0].transport = spindle_nvme_transport::TransportKind::Rdma;
        let text = describe(&plan);
        for part in
            ["listener    NVMe/RDMA 127.0.0.1:4420,", "\n  nvme discover -t rdma -a 127.0.0.1 -s 4420\n"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }

    #[test]
    fn a_reload_is_told_with_its_refusals() {
        let builtin = Config::builtin();
        let against = Path::new("a.toml");
        assert_eq!(
            describe_changes(against, &[]),
            "\nA reload from a.toml, with all of its disks open\n  changes nothing\n"
        );
        let mut other = builtin.plan().clone();
        Arc::make_mut(&mut other.disks[0]).block_bytes = 4096;
        let text = describe_changes(against, &other.changes(builtin.plan()));
        assert!(
            text.contains("block_bytes from 512 to 4096: refused") && text.ends_with("refused as a whole\n"),
            "{text}"
        );
    }
}
