//! Every key of the schema with a wrong value of each kind, by the table that the reference is made of.

use super::*;
use crate::config::kind::Kind;
use crate::config::schema::{self, Key, Preset, ROOT, Reload};

/// A wrong value as it stands in the file, and what is said about it.
struct Wrong {
    written: String,
    /// The part of the field that is named: `[0]` of a list.
    part: &'static str,
    value: String,
    allowed: String,
}

const TYPES: [(&str, &str); 8] = [
    ("flag", "true"),
    ("integer", "7"),
    ("float", "1.5"),
    ("float", "nan"),
    ("text", "\"no such value\""),
    ("date", "2026-01-01"),
    ("list", "[7]"),
    ("section", "{ a = 7 }"),
];

fn quoted(text: &str) -> String {
    format!("\"{text}\"")
}

/// The type that has values which are right, and values of that type and of others that are not.
fn of_kind(kind: &Kind) -> (&'static str, Vec<String>) {
    let texts = |texts: &[&str]| texts.iter().copied().map(quoted).collect::<Vec<_>>();
    let long = "x".repeat(5000);
    let around = |min: u64, max: u64| {
        let below = min.checked_sub(1).map_or("-1".to_owned(), |less| less.to_string());
        [below, (max + 1).to_string(), "-1".to_owned(), "9".repeat(30)].into_iter()
    };
    match kind {
        Kind::Flag => ("flag", texts(&["", "true"])),
        Kind::Integer { min, max } => {
            let text = [quoted(&min.to_string()), quoted("")];
            ("integer", around(*min, *max).chain(text).collect())
        }
        Kind::Size { min, max, multiple } => {
            let mut more: Vec<_> = around(*min, *max).collect();
            more.extend(texts(&["", "1 parsec", "KiB", "-1KiB", "1.5KiB", "99999999999 TiB"]));
            more.push(quoted(&format!("{} B", max + 1)));
            if *multiple > 1 {
                more.push((min + 1).to_string());
            }
            ("integer", more)
        }
        Kind::Word(words) => {
            let upper = words[0].to_ascii_uppercase();
            ("", texts(&["", &upper, &long, &format!("{} ", words[0])]))
        }
        Kind::Number(numbers) => {
            let near = numbers.iter().flat_map(|it| [it - 1, it + 1]).map(|it| it.to_string());
            ("", near.chain(around(0, u64::MAX - 1)).chain([quoted("512"), "0".to_owned()]).collect())
        }
        Kind::Text { chars_max } => {
            let more = "x".repeat(chars_max + 1);
            ("text", texts(&["", &more, &long, " a", "a ", "\u{e9}", "a\\tb", "a\\u0000"]))
        }
        Kind::Nqn => ("text", texts(&["", &"n".repeat(224), "nqn.a\\nb"])),
        Kind::Uuid => ("", texts(&["", "6f1b3b7e", "00000000-0000-0000-0000-000000000000", &long])),
        Kind::Nguid => {
            let (zero, short, other) = ("0".repeat(32), "1".repeat(31), "g".repeat(32));
            ("", texts(&["", &zero, &short, &other, &long]))
        }
        Kind::Address => {
            let wrong = ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "::1:4420", "localhost:4420"];
            ("", texts(&wrong))
        }
        Kind::Path => ("", texts(&["", "disk.img", "./disk.img", "~/disk.img"])),
        Kind::SocketOrNone => (
            "",
            texts(&["run/sock", " ", &format!("/{}", "x".repeat(107)), "/a\\u0000", &format!("/{long}")]),
        ),
        Kind::PciAddress => ("", texts(&["", "01:00.0", "0000:01:00", "0000:01:20.0", "0000:01:00.8"])),
        Kind::List(_) => ("list", Vec::new()),
        Kind::Section(_) | Kind::Sections(_) => panic!("sections are looked at by themselves"),
        Kind::String | Kind::Object(_) | Kind::Only(_) => panic!("{kind}: of parameters"),
    }
}

fn wrong(kind: &Kind) -> Vec<Wrong> {
    let (its, more) = of_kind(kind);
    let others = TYPES.iter().filter(|(of, _)| *of != its).map(|(_, written)| (*written).to_owned());
    let whole = |written: String| {
        let (value, allowed) = (written.clone(), format!("must be {kind}"));
        Wrong { written, part: "", value, allowed }
    };
    let mut all: Vec<Wrong> = others.chain(more).map(whole).collect();
    if let Kind::List(of) = kind {
        let element = |wrong: Wrong| Wrong { written: format!("[{}]", wrong.value), part: "[0]", ..wrong };
        all.extend(self::wrong(of).into_iter().map(element));
    }
    all
}

/// The headings above a key of the section with this heading, and the path of the section.
fn above(heading: &str) -> (String, String) {
    let path = heading.trim_matches(['[', ']']);
    let mut field = path.to_owned();
    let mut text = format!("{heading}\n");
    if heading.starts_with("[[") {
        field.push_str("[0]");
    }
    if let Some((outer, inner)) = path.split_once('.')
        && schema::sections().iter().any(|(heading, ..)| *heading == format!("[[{outer}]]"))
    {
        text.insert_str(0, &format!("[[{outer}]]\n"));
        field = format!("{outer}[0].{inner}{}", if heading.starts_with("[[") { "[0]" } else { "" });
    }
    (text, field)
}

/// One of the errors of this text begins with where and what it is, and says what is allowed.
fn assert_said(text: &str, beginning: &str, allowed: &str) {
    let found = errors(text);
    let is_it = |error: &&String| error.starts_with(beginning) && error.contains(allowed);
    let Some(error) = found.iter().find(is_it) else {
        panic!("{beginning} ... {allowed}: not in {found:#?}\n{text}")
    };
    assert!(error.len() < 600, "an error of {} bytes: {error}", error.len());
}

/// What can be wrong with the value of a key; how many cases there are.
fn check_values(key: &Key, head: &str, path: &str) -> usize {
    let line = head.lines().count() + 1;
    let all = wrong(&key.kind);
    assert!(all.len() >= 8, "{path}.{}: too little was tried", key.name);
    for Wrong { written, part, value, allowed } in &all {
        let value: String = value.chars().take(60).collect();
        let beginning = format!("t.toml:{line}: {path}.{}{part} = {value}", key.name);
        assert_said(&format!("{head}{} = {written}\n", key.name), &beginning, allowed);
    }
    all.len()
}

#[test]
fn each_key_with_a_wrong_value_of_each_kind() {
    let (mut keys, mut cases) = (0, 0);
    for (heading, _, of_section) in schema::sections() {
        let (head, path) = above(&heading);
        let line = head.lines().count();
        for key in of_section.iter().filter(|key| key.section().is_none()) {
            keys += 1;
            cases += check_values(key, &head, &path);
            let (name, next) = (key.name, line + 1);
            // Twice.
            let twice = format!("{head}{name} = 7\n{name} = 8\n");
            assert_said(
                &twice,
                &format!("t.toml:{}: not TOML: duplicate key", line + 2),
                &format!("`{name} = 8`"),
            );
            // By a name that is nearly its own.
            let misspelt = format!("{name}{}", name.chars().last().expect("a name"));
            let beginning = format!("t.toml:{next}: {path}.{misspelt} = 7: unknown key");
            assert_said(&format!("{head}{misspelt} = 7\n"), &beginning, &format!("did you mean {name:?}?"));
            cases += 2;
            if key.preset == Preset::Required {
                let beginning = format!("t.toml:{line}: {path}.{name}: missing");
                assert_said(&head, &beginning, &format!("it must be {}", key.kind));
                cases += 1;
            }
        }
        let beginning = format!("t.toml:{}: {path}.quite_another_one = 7: unknown key", line + 1);
        let first = of_section.first().expect("a key").name;
        assert_said(&format!("{head}quite_another_one = 7\n"), &beginning, &format!("allowed: {first}"));
    }
    // Each row of the reference has been tried.
    let rows = schema::reference().lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(keys, rows);
    assert!(cases >= 1240, "{cases}");
}

#[test]
fn each_section_with_a_value_of_another_form() {
    let (mut sections, mut cases) = (0, 0);
    let outer = [("".to_owned(), ROOT)].into_iter();
    let inner = schema::sections().into_iter().map(|(heading, _, keys)| (heading, keys));
    for (heading, keys) in outer.chain(inner) {
        let (head, path) = if heading.is_empty() { Default::default() } else { above(&heading) };
        let line = head.lines().count() + 1;
        for key in keys.iter().filter(|key| key.section().is_some()) {
            sections += 1;
            let field = if path.is_empty() { key.name.to_owned() } else { format!("{path}.{}", key.name) };
            let is_list = matches!(key.kind, Kind::Sections(_));
            for (of, written) in TYPES {
                let (part, value, allowed) = match (of, is_list) {
                    ("section", false) => continue,
                    ("section", true) => ("", String::new(), "there may be several, so it is written [["),
                    ("list", true) => ("[0]", " = 7".to_owned(), "must be a section, written [["),
                    (_, true) => ("", format!(" = {written}"), "must be sections, each written [["),
                    (_, false) => ("", format!(" = {written}"), "must be a section, written ["),
                };
                let beginning = format!("t.toml:{line}: {field}{part}{value}: ");
                assert_said(&format!("{head}{} = {written}\n", key.name), &beginning, allowed);
                cases += 1;
            }
        }
    }
    assert_eq!(sections, schema::sections().len());
    assert!(cases >= 7 * sections, "{cases}");
}

#[test]
fn what_is_named_twice_in_a_list_or_told_twice_and_referrals_to_nowhere() {
    let (host, name) = ("\"nqn.2026-01.test:h\"", "\"127.0.0.1:4420\"");
    let lists = format!("hosts = [{host},\n {host}]\nlisteners = [{name},\n {name}]\n");
    let found = errors(&format!("{LISTENER}[[subsystem]]\nnqn = \"nqn.2026-01.test:s\"\n{lists}"));
    assert_eq!(
        found,
        [
            format!(
                "t.toml:6: subsystem[0].hosts[1] = {host}: the same host twice; it must be another one, or \
                 be left out"
            ),
            format!(
                "t.toml:8: subsystem[0].listeners[1] = {name}: the same listener twice; it must be another \
                 one, or be left out"
            ),
        ]
    );
    let referral = "[[referral]]\naddress = \"192.0.2.9:8009\"\n";
    let expected = "t.toml:4: referral[1].address = \"192.0.2.9:8009\": also that of the referral in line 2";
    assert_eq!(errors(&[referral, referral].concat()), [expected]);
    let nowhere = referral.replace("192.0.2.9", "0.0.0.0");
    assert!(errors(&nowhere)[0].starts_with("t.toml:2: referral[0].address = \"0.0.0.0:8009\": must be an"));
    // Another transport is another place.
    plan(&[referral, referral, "transport = \"rdma\"\n"].concat());
}

/// A new key belongs here only if other code has its line: a reload accepts its change without one.
#[test]
fn the_keys_whose_row_has_no_line_in_the_list_of_changes_are_these() {
    let untold = |key: &&Key| key.section().is_none() && matches!(key.reload, Reload::Untold);
    let names: Vec<String> = schema::sections()
        .iter()
        .flat_map(|(heading, _, keys)| {
            keys.iter().filter(untold).map(move |key| format!("{heading} {}", key.name))
        })
        .collect();
    let wanted = [
        "[reactor] adaptive_spin_us",
        "[pool] admin_count",
        "[[pool.zone]] buffer",
        "[[pool.zone]] count",
        "[tcp] in_capsule",
        "[[disk]] name",
        "[[disk]] size",
        "[[disk]] create",
        "[disk.cache] size",
        "[disk.cache] policy",
        "[disk.cache] mode",
        "[disk.cache] read_ahead",
        "[disk.cache] sole_writer",
        "[disk.delay] latency_us",
        "[disk.delay] bandwidth",
        "[disk.delay] seek_us",
        "[disk.cluster] agents",
        "[[listener]] address",
        "[[listener]] transport",
        "[[listener]] name",
        "[[listener]] in_capsule",
        "[[subsystem]] nqn",
        "[[subsystem]] allow_any_host",
        "[[subsystem.namespace]] nsid",
        "[[subsystem.namespace]] disk",
        "[[subsystem.namespace]] uuid",
        "[[subsystem.namespace]] nguid",
        "[[referral]] address",
        "[[referral]] transport",
    ];
    assert_eq!(names, wanted);
}
