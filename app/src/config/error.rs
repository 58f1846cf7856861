//! Errors of a configuration, each with file, line, field, value and allowed values where they apply.
//!
//! ```text
//!   /etc/spindle/spindle.toml:12: reactor.cores[1] = 99: must be a core that this process may use: 0 or 1
//! ```

use std::fmt;
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// Line in the file, from 1; 0 for an error of the whole file.
    pub line: usize,
    /// Path of the field, like `subsystem[0].namespace[1].nsid`; empty for a syntax error and for an error of
    /// the whole file.
    pub field: String,
    /// The value as written in the file, or of a default as written in the schema, shortened. Empty for a
    /// missing key, a section, a syntax error or an error of the whole file.
    pub value: String,
    /// Message: the error and the allowed values.
    pub allowed: String,
}

/// All errors of one file, in the order of its lines, without equal errors after each other; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors {
    file: PathBuf,
    errors: Vec<ConfigError>,
}

impl ConfigErrors {
    pub(super) fn new(file: &Path, mut errors: Vec<ConfigError>) -> ConfigErrors {
        errors.sort_by_key(|error| error.line);
        errors.dedup();
        ConfigErrors { file: file.to_owned(), errors }
    }

    pub(super) fn unreadable(file: &Path, error: &std::io::Error) -> ConfigErrors {
        let (field, value) = (String::new(), String::new());
        let allowed = format!("cannot read the configuration: {error}");
        ConfigErrors { file: file.to_owned(), errors: vec![ConfigError { line: 0, field, value, allowed }] }
    }

    /// Returns one line of text for each error, with file and line number.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let file = self.file.display();
        self.errors.iter().map(move |error| match error.line {
            0 => format!("{file}: {error}"),
            line => format!("{file}:{line}: {error}"),
        })
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.errors.len() > 1 {
            writeln!(f, "{} has {} errors:", self.file.display(), self.errors.len())?;
        }
        let lines: Vec<String> = self.lines().collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for ConfigErrors {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.field.as_str(), self.value.as_str()) {
            ("", _) => f.write_str(&self.allowed),
            (field, "") => write!(f, "{field}: {}", self.allowed),
            (field, value) => write!(f, "{field} = {value}: {}", self.allowed),
        }
    }
}
