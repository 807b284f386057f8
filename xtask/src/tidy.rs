//! Rules of the house.
use anyhow::Result;
/// Placeholder until the next step.
pub fn run() -> Result<()> {
    Ok(())
}
