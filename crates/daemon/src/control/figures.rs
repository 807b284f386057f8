//! The page of figures, as it is asked for.

use std::sync::Arc;

use api::VmStatus;
use axum::body::Bytes;
use wire::agent::job::Stats;

use super::Control;
use crate::control_error::ControlError;
use crate::metrics::{self, Facts, Whole};

impl Control {
    /// Figures of all lines and guests. A caller during its making gets that page.
    ///
    /// # Errors
    /// [`ControlError::Lost`].
    pub async fn figures(self: &Arc<Self>) -> Result<Bytes, ControlError> {
        let mut page = self.pages.join(|| make(self.clone()));
        let made = page.wait_for(Option::is_some).await;
        let made = made.map_err(|_| ControlError::Lost)?;
        made.clone().ok_or(ControlError::Lost)
    }

    fn write_figures(&self, vms: &[VmStatus], stats: &[Option<Box<Stats>>]) -> String {
        let parts = &self.parts;
        metrics::write(&Facts {
            vms,
            stats,
            networks: &self.networks_in_detail(),
            counted: &parts.worker.figures(),
            events: &parts.events,
            captures: &parts.captures,
            restart: parts.restart.as_ref(),
            whole: &Whole {
                unavailable: self.in_force().unavailable_parts(),
                keeper_ended: self.has_lost_keeper(),
                paths_ended: sys::links::helper_has_ended(),
            },
            stalled_clients: parts.stalled_clients.count(),
            switchboard: &self.switchboard_report(),
            windows: &self.windows(),
        })
    }
}

async fn make(control: Arc<Control>) -> Bytes {
    let vms = control.ask(Control::list).await.unwrap_or_default();
    let stats = metrics::ask_guests(control.readiness.gates(), &vms).await;
    let page = control.ask(move |control| control.write_figures(&vms, &stats));
    page.await.unwrap_or_default().into()
}
