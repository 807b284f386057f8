//! The options of `top`.

use clap::Args;

use super::Time;
use crate::top::{MAX_SAMPLES, Sort};

/// The options of `top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Keys: Enter looks closer, at a VM's circuits or at a circuit, and Esc goes back; Tab turns to the circuits of all VMs; s sorts by the next column, r turns
the order round; / shows only rows with some letters; Space holds still; ? shows all keys; q leaves.

It needs a terminal of 80 by 24 characters. Without colours if NO_COLOR is set. While the daemon is away it waits for it.

Exit codes: 0 left, or printed; 1 there is no daemon, or no terminal; 2 the command line is wrong.")]
pub struct TopArguments {
    /// Time between two samples, 100ms to 1h
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub interval: Time,
    /// Begin in this order
    #[arg(long, value_enum, value_name = "COLUMN", default_value_t = Sort::Rate, hide_possible_values = false)]
    pub sort: Sort,
    /// Begin with circuits instead of VMs
    #[arg(long, conflicts_with = "vm")]
    pub circuits: bool,
    /// Begin with this VM, or DOMAIN/NAME, and its circuits
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Show only rows with these letters in them
    #[arg(
        long,
        value_name = "LETTERS",
        default_value = "",
        hide_default_value = true
    )]
    pub filter: String,
    /// Print one frame as plain text and end
    #[arg(long)]
    pub once: bool,
    /// Take so many samples before that frame is printed
    #[arg(long, value_name = "NUMBER", default_value_t = 2, requires = "once", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_SAMPLES)))]
    pub samples: u16,
}
