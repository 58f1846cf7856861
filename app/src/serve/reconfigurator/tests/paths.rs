//! A path that does not answer delays only the changes of its own disk.

use serde_json::{Value, json};

use super::refusals::target;
use super::*;
use crate::config::Hung;
use crate::rpc::tests::change;

/// Returns the result of a call, or why it is refused.
fn call(served: &mut Reconfigurator, method: &str, params: Value) -> Result<Value, String> {
    let (act, args) = change(method, params).expect("a right call");
    let done = served.change(&LogControl::unread(), |edit| act(edit, &args));
    done.map(|done| done.result).map_err(|failure| failure.message)
}

/// Runs `test` on a thread, since a call that hangs has no end.
fn in_time(test: impl FnOnce() + Send + 'static) {
    let (end, is_over) = channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = end.send(());
    });
    let is_over = is_over.recv_timeout(GIVE_UP);
    assert!(is_over.is_ok(), "a path that does not answer holds up the rest");
    thread.join().expect("it has ended");
}

#[test]
fn a_path_that_does_not_answer_delays_only_changes_of_its_own_disk() {
    in_time(|| {
        let (folder, _file, mut served) = target();
        let new = folder.0.join("new");
        std::fs::write(&new, [0; 4096]).expect("written");
        let _hung = [folder.0.join("f0"), new.clone()].map(Hung::new);

        let others = Instant::now();
        let null = json!({ "name": "n1", "num_blocks": 8, "block_size": 512 });
        assert_eq!(call(&mut served, "bdev_null_create", null), Ok(json!("n1")));
        let shorter = json!({ "name": "n0", "new_size": 2 });
        assert_eq!(call(&mut served, "bdev_null_resize", shorter), Ok(json!(true)));
        assert!(others.elapsed() < Duration::from_secs(2), "{:?}", others.elapsed());

        let text = served.config.text().to_owned();
        let grown = json!({ "name": "f0", "new_size": 4 });
        let refused = call(&mut served, "spindle_file_resize", grown).expect_err("hung");
        assert!(refused.contains("f0\": must be a file or block device"), "{refused}");
        assert!(refused.contains("it does not answer within 2 s"), "{refused}");
        let added = json!({ "name": "new", "filename": new });
        let refused = call(&mut served, "bdev_aio_create", added).expect_err("hung");
        assert!(refused.contains("new\"") && refused.contains("it does not answer"), "{refused}");
        assert_eq!(served.config.text(), text);

        let known = json!({ "name": "r0" });
        assert_eq!(call(&mut served, "bdev_aio_delete", known), Ok(json!(true)));
    });
}

#[test]
fn a_reload_leaves_a_disk_whose_path_does_not_answer_as_it_is() {
    in_time(|| {
        let (folder, file, mut served) = target();
        let _hung = Hung::new(folder.0.join("f0"));
        let disk = |snapshot: &Snapshot, name: &str| {
            snapshot.disks.iter().flatten().find(|disk| disk.name() == name).cloned()
        };
        let before = disk(&served.snapshot, "f0").expect("open");
        std::fs::write(folder.0.join("new"), [0; 4096]).expect("written");
        let mut text = std::fs::read_to_string(&file).expect("the file");
        for (name, kind) in [("n1", "null\"\nsize = \"1MiB"), ("g", "file\"\npath = \"F/new")] {
            let kind = kind.replace('F', &folder.0.display().to_string());
            text = text.replacen(
                "[[disk]]",
                &format!("[[disk]]\nname = {name:?}\nkind = \"{kind}\"\n[[disk]]"),
                1,
            );
        }
        std::fs::write(&file, text).expect("written");
        let next = served.reload(&LogControl::unread()).expect("applied");
        assert!(disk(&next, "n1").is_some() && disk(&next, "g").is_some());
        assert!(disk(&next, "f0").is_some_and(|it| Arc::ptr_eq(&it, &before)));
        let notes = served.plan().notes.join("\n");
        assert!(notes.contains("f0\": must be a file") && notes.contains("does not answer"), "{notes}");
    });
}

#[test]
fn the_start_serves_the_rest_and_the_disk_once_its_path_answers() {
    in_time(|| {
        let (folder, file, served) = target();
        drop(served);
        let hung = Hung::new(folder.0.join("f0"));
        let config = Config::load(&file).expect("valid but for the path");
        let targets = Arc::new(FarTargets::default());
        let remote = Arc::new(move |plan: &RemotePlan| targets.open(plan));
        let origins = Origins { drives: Arc::new(Bays::default()), remote };
        let mut served = Reconfigurator::open(config, origins, false).expect("served");
        let bytes = |served: &Reconfigurator| {
            let mut disks = served.snapshot.disks.iter().flatten();
            disks.find(|disk| disk.name() == "f0").map(|disk| disk.geometry().bytes())
        };
        assert!(served.snapshot.disks.iter().flatten().any(|disk| disk.name() == "r0"));
        assert_eq!(bytes(&served), None);
        assert!(served.missing().iter().any(|(what, _)| what == "disk f0"), "{:?}", served.missing());
        drop(hung);
        let mut now = Instant::now();
        wait(|| {
            now += REMOTE_RETRY_PERIOD;
            let _ = served.poll(now);
            bytes(&served) == Some(2 << 20)
        });
    });
}
