//! `spindle completions SHELL`: prints the completion script, with the control socket's methods.

use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, CommandFactory};

use crate::cli::{Cli, CompletionsArgs};
use crate::config::Kind;
use crate::rpc::methods::METHODS;
use crate::rpc::params::Param;
use spindle_app_bench::say;

pub fn run(args: &CompletionsArgs) {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command(), "spindle", &mut script);
    say!("{}", String::from_utf8_lossy(&script).trim_end());
}

/// Returns the command line with each method as a subcommand of `spindle ctl`.
fn command() -> Command {
    let method = |name, about, params| Command::new(name).about(about).args(options("", params));
    let methods = METHODS.iter().map(|it| method(it.name, it.about, it.params));
    let cli = Cli::command().mut_subcommand("ctl", |ctl| ctl.subcommands(methods));
    // `help` would repeat all subcommands in the script.
    cli.disable_help_subcommand(true)
}

/// Returns parameters as options. Members of an object are named `object.parameter`.
fn options(path: &str, params: &'static [Param]) -> Vec<Arg> {
    let option = |param: &'static Param| {
        let name = format!("{path}{}", param.name);
        if let Kind::Object(inner) = param.kind {
            return options(&format!("{name}."), inner);
        }
        let option = Arg::new(name.clone()).long(name).help(param.about);
        vec![if let Kind::Word(words) = param.kind {
            option.value_parser(PossibleValuesParser::new(words))
        } else {
            option
        }]
    };
    params.iter().flat_map(option).collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use clap_complete::Shell;

    use super::*;

    #[test]
    fn every_shell_completes_verbs_methods_and_their_parameters() {
        command().debug_assert();
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut command(), "spindle", &mut script);
            let script = String::from_utf8(script).expect("text");
            // `clap_complete` leaves out options of subcommands below the second level for fish.
            let option = if *shell == Shell::Fish { "subsystem" } else { "any-host" };
            for wanted in ["connections", option, "bdev_malloc_create", "listen_address.traddr"] {
                assert!(script.contains(wanted), "{shell}: {wanted}");
            }
        }
    }
}
