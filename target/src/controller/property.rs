//! Property Get and Set: the registers of a controller over Fabrics (Base 2.0 sections 3.1.3, 6.4 and 6.5).

use nvme_spec::fabrics::Property;
use nvme_spec::register::{
    self, Cap, Cc, CommandSetSelected, Crto, Csts, ShutdownNotification, ShutdownStatus, Vs,
};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::lifetime::{ControllerState, Effect, Event};
use super::limits::READY_TIMEOUT_UNITS;
use super::{Context, Controller, Kind};
use crate::refusal::{Refusal, field};

/// VS: the NVMe version that controllers report.
pub(super) const VERSION: Vs = Vs::V2_0;

/// Required CC.IOSQES and CC.IOCQES of an I/O controller, as log2 of bytes: 64 and 16 bytes.
const ENTRY_SIZES: (u8, u8) = (6, 4);

impl Controller {
    /// Returns the value of a property and its size in bytes; `None`: there is no property at `offset`.
    fn property_value(&self, offset: u32) -> Option<(u64, u8)> {
        let dword = |value: u32| Some((u64::from(value), 4));
        match offset {
            register::CAP => Some((self.cap().into_bits(), 8)),
            register::VS => dword(VERSION.into_bits()),
            register::CC => dword(self.cc.into_bits()),
            register::CSTS => dword(self.csts().into_bits()),
            // CAP.NSSRS is 0 (one host must not reset the subsystem for others), so NSSR reads as 0 and
            // writes are refused.
            register::NSSR => dword(0),
            register::CRTO => dword(Crto::new().with_crwmt(u16::from(READY_TIMEOUT_UNITS)).into_bits()),
            _ => None,
        }
    }

    /// Value of the Controller Capabilities register (Base 2.0, 3.1.3.1).
    #[must_use]
    pub fn cap(&self) -> Cap {
        Cap::new()
            .with_mqes_z(self.queue_entries_max.saturating_sub(1))
            .with_cqr(true)
            .with_to(READY_TIMEOUT_UNITS)
            .with_css_nvm(true)
            .with_css_io_command_sets(true)
            .with_crwms(true)
    }

    /// Value of the Controller Status register (Base 2.0, 3.1.3.6).
    #[must_use]
    pub fn csts(&self) -> Csts {
        let shst = match self.state {
            ControllerState::ShutDown if self.is_quiescing => ShutdownStatus::OCCURRING,
            ControllerState::ShutDown => ShutdownStatus::COMPLETE,
            ControllerState::Disabled
            | ControllerState::Enabled
            | ControllerState::Failed
            | ControllerState::Removed => ShutdownStatus::NORMAL,
        };
        // RDY follows EN, but is cleared only once the I/O queues are closed and no disk has their commands
        // (or `ORPHAN_MAX` has passed). A shutdown does not change RDY (section 3.6.1); a failure clears it.
        let is_resetting = self.state == ControllerState::Disabled && self.is_quiescing;
        let rdy = (self.cc.en() || is_resetting) && !self.state.is_over();
        Csts::new().with_rdy(rdy).with_cfs(self.state == ControllerState::Failed).with_shst(shst.0)
    }

    pub(super) fn property_get(&self, sqe: &Sqe) -> Result<u64, Refusal> {
        let command = Property::new(sqe);
        let (value, bytes) =
            self.property_value(command.offset()).ok_or(Refusal::invalid(field::PROPERTY_OFFSET))?;
        if command.bytes() != Some(bytes) {
            return Err(Refusal::invalid(field::CDW10));
        }
        Ok(value)
    }

    pub(super) fn property_set(&mut self, cx: &Context<'_>, sqe: &Sqe) -> Result<Effect, Refusal> {
        let command = Property::new(sqe);
        if command.offset() != register::CC {
            return Err(Refusal::invalid(field::PROPERTY_OFFSET));
        }
        if command.bytes() != Some(4) {
            return Err(Refusal::invalid(field::CDW10));
        }
        self.set_cc(cx, Cc::from_bits(command.value_u32()))
    }

    /// Writes CC: checks all fields, then executes the transitions of EN and SHN. Command Sequence Error if
    /// the controller has failed, or for an enable while a reset or shutdown is not complete.
    fn set_cc(&mut self, cx: &Context<'_>, new: Cc) -> Result<Effect, Refusal> {
        if self.state.is_over() {
            return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR.dnr(), None));
        }
        self.check_cc(new)?;
        // Section 3.1.3.5: the result is undefined if the host does not wait for RDY. Refused without DNR, so
        // that the host may retry.
        if new.en() && !self.cc.en() && self.is_quiescing {
            return Err(Refusal::of(Status::COMMAND_SEQUENCE_ERROR, Some(field::PROPERTY_VALUE)));
        }
        let old = std::mem::replace(&mut self.cc, new);
        let mut effect = Effect::None;
        if old.en() && !new.en() {
            effect = self.step(cx.now, Event::Disable);
        } else if new.en() && !old.en() {
            effect = self.step(cx.now, Event::Enable);
        }
        let (had, has) = (is_shutdown(old), is_shutdown(new));
        if has && !had {
            let shutdown = self.step(cx.now, Event::Shutdown);
            effect = if shutdown == Effect::None { effect } else { shutdown };
        }
        Ok(effect)
    }

    fn check_cc(&self, new: Cc) -> Result<(), Refusal> {
        let refused = Err(Refusal::invalid(field::PROPERTY_VALUE));
        let css = CommandSetSelected(new.css());
        let is_css_known = css == CommandSetSelected::NVM || css == CommandSetSelected::ALL;
        // CAP has MPSMIN and MPSMAX 0, AMS 0, CRIMS 0, so those fields and reserved bits must be 0.
        let known = Cc::new()
            .with_en(new.en())
            .with_css(new.css())
            .with_shn(new.shn())
            .with_iosqes(new.iosqes())
            .with_iocqes(new.iocqes());
        if new != known || !is_css_known || new.shutdown() > ShutdownNotification::ABRUPT {
            return refused;
        }
        let sizes = (new.iosqes(), new.iocqes());
        let is_size_known = sizes == ENTRY_SIZES || (sizes == (0, 0) && self.kind == Kind::Discovery);
        if new.en() && !is_size_known {
            return refused;
        }
        // CSS and entry sizes must not change while the controller is enabled: queues depend on them.
        let is_running = self.cc.en() && new.en();
        if is_running && (new.css() != self.cc.css() || sizes != (self.cc.iosqes(), self.cc.iocqes())) {
            return refused;
        }
        Ok(())
    }
}

fn is_shutdown(cc: Cc) -> bool {
    cc.shutdown() != ShutdownNotification::NONE
}
