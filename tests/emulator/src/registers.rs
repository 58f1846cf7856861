//! The controller's registers: CSTS as the result of CC (Base 2.0 sections 3.1.3 and 3.5).

use nvme_spec::register::{
    ACQ, AQA, ASQ, Aqa, CAP, CC, CRTO, CSTS, Cap, Cc, CommandSetSelected, Crto, Csts, ShutdownNotification,
    ShutdownStatus, VS, Vs,
};

use crate::admin::Admin;
use crate::controller::Controller;
use crate::queues::{Cq, Sq};

/// State of the controller between CC.EN and CSTS.RDY.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EnableState {
    /// CSTS.RDY is 0. A step that reads CC.EN 1 begins to enable the controller.
    Disabled,
    /// CC.EN was set. At this step CSTS.RDY becomes 1, or CSTS.CFS if the registers are invalid.
    Enabling(u64),
    /// CSTS.RDY is 1, or the enable failed with CSTS.CFS.
    Ready,
    /// CC.EN was cleared. At this step the controller is reset and CSTS.RDY becomes 0.
    Disabling(u64),
}

impl Controller {
    /// Applies CC, unless `is_frozen`, and updates CSTS. Records doorbell writes of a disabled controller as
    /// violations. Returns true if the enable state, CSTS.SHST or CSTS.CFS changed.
    pub(crate) fn step_registers(&mut self) -> bool {
        let before = (self.enable_state, self.shst, self.is_fatal);
        if matches!(self.enable_state, EnableState::Disabled | EnableState::Enabling(_)) {
            self.check_early_doorbells();
        }
        if !self.is_frozen {
            let cc = Cc::from_bits(self.registers.load(u64::from(CC)));
            self.apply_cc(cc);
            self.apply_shutdown(cc);
        }
        self.report_status();
        before != (self.enable_state, self.shst, self.is_fatal)
    }

    fn apply_cc(&mut self, cc: Cc) {
        let then = self.now.saturating_add(self.spec.ready_steps);
        match (self.enable_state, cc.en()) {
            (EnableState::Disabled, true) => self.enable_state = EnableState::Enabling(then),
            (EnableState::Enabling(_) | EnableState::Ready, false) => {
                self.enable_state =
                    EnableState::Disabling(then.max(self.now.saturating_add(self.spec.csts_ones_steps)));
                self.ones_until = self.now.saturating_add(self.spec.csts_ones_steps);
            }
            (EnableState::Disabling(_), true) => {
                self.host.record_violation(|| "CC.EN is set before CSTS.RDY is 0".to_owned());
            }
            (EnableState::Enabling(_) | EnableState::Ready, true)
            | (EnableState::Disabled | EnableState::Disabling(_), false) => {}
        }
        match self.enable_state {
            EnableState::Enabling(at) if at <= self.now => self.enable(cc),
            EnableState::Disabling(at) if at <= self.now => self.reset_controller(),
            EnableState::Disabled
            | EnableState::Ready
            | EnableState::Enabling(_)
            | EnableState::Disabling(_) => {}
        }
    }

    fn apply_shutdown(&mut self, cc: Cc) {
        let is_requested = cc.shutdown() != ShutdownNotification::NONE;
        let is_normal = self.shst == ShutdownStatus::NORMAL.0;
        if is_requested
            && is_normal
            && matches!(self.enable_state, EnableState::Ready | EnableState::Disabled)
        {
            self.shst = ShutdownStatus::OCCURRING.0;
            let steps = match self.spec.shutdown_steps {
                0 => self.spec.ready_steps,
                steps => steps,
            };
            self.shutdown = Some(self.now.saturating_add(steps));
        }
        if self.shutdown.is_some_and(|at| at <= self.now) {
            self.shutdown = None;
            self.shst = ShutdownStatus::COMPLETE.0;
            self.media.iter_mut().for_each(crate::medium::EmulatedMedia::flush);
        }
    }

    /// Creates the admin queues after CC.EN was set. If CC, AQA, ASQ or ACQ is invalid, records a violation
    /// and sets CSTS.CFS.
    fn enable(&mut self, cc: Cc) {
        self.enable_state = EnableState::Ready;
        self.counters.enables += 1;
        let aqa = Aqa::from_bits(self.registers.load(u64::from(AQA)));
        let (asq, acq) = (self.registers.load64(u64::from(ASQ)), self.registers.load64(u64::from(ACQ)));
        let is_set_known =
            [CommandSetSelected::NVM, CommandSetSelected::ALL].contains(&CommandSetSelected(cc.css()));
        let is_fit = is_set_known && cc.mps() == 0 && cc.ams() == 0;
        let is_aligned = asq.is_multiple_of(4096) && acq.is_multiple_of(4096);
        if !is_fit || !is_aligned || aqa.asqs_z() == 0 || aqa.acqs_z() == 0 {
            self.host
                .record_violation(|| format!("enabled with {cc:?}, {aqa:?}, ASQ {asq:#x}, ACQ {acq:#x}"));
            return self.set_fatal();
        }
        let queues = usize::from(self.spec.queue_pairs) + 1;
        self.sqs.resize_with(queues, || None);
        self.cqs.resize_with(queues, || None);
        let mut cq = Cq::new(acq, u32::from(aqa.acqs_z()) + 1);
        cq.users = 1;
        if let (Some(sqs), Some(cqs)) = (self.sqs.first_mut(), self.cqs.first_mut()) {
            *sqs = Some(Sq::new(0, asq, u32::from(aqa.asqs_z()) + 1, 0));
            *cqs = Some(cq);
        }
    }

    /// Resets the controller (controller level reset). Drops queues, commands, features and the doorbell
    /// buffer; keeps registers, blocks and health. If CSTS.CFS was set, also calls `lose_cache`.
    pub(crate) fn reset_controller(&mut self) {
        self.enable_state = EnableState::Disabled;
        if std::mem::take(&mut self.is_fatal) {
            self.lose_cache();
        }
        self.shutdown = None;
        self.shst = 0;
        self.sqs.clear();
        self.cqs.clear();
        self.qid_max = 0;
        self.held.clear();
        self.shadow = None;
        self.queue_pairs = self.spec.queue_pairs;
        self.admin = Admin::new();
        self.registers.discard_doorbells();
    }

    /// Loses the volatile write cache if `spec.loses_cache_at_reset`.
    pub(crate) fn lose_cache(&mut self) {
        if self.spec.loses_cache_at_reset {
            self.media.iter_mut().for_each(crate::medium::EmulatedMedia::lose_all);
        }
    }

    /// Resets the controller and its registers, ends a freeze and turns bus mastering on. For a function
    /// level reset or a link-up, the caller must call `lose_cache` before.
    pub(crate) fn reset_function(&mut self) {
        self.reset_controller();
        self.is_frozen = false;
        self.host.is_bus_master = true;
        self.registers.clear();
        self.report_status();
    }

    fn check_early_doorbells(&mut self) {
        // Only the doorbells that a queue could have, not all of BAR 0: each check is a load.
        for qid in 0..=self.spec.queue_pairs {
            let sq = nvme_spec::pcie::sq_tail_doorbell(qid, self.spec.dstrd);
            let cq = nvme_spec::pcie::cq_head_doorbell(qid, self.spec.dstrd);
            for doorbell in [sq, cq] {
                if let Some(value) = self.registers.take_doorbell(doorbell) {
                    self.host.record_violation(|| {
                        format!("doorbell {doorbell:#x} written with {value}: the controller is disabled")
                    });
                }
            }
        }
    }

    /// Sets CAP, VS, CRTO and CSTS, which overwrites the host's writes.
    pub(crate) fn report_status(&mut self) {
        let spec = &self.spec;
        let has_crto = spec.version >= Vs::V2_0;
        let mqes_z = u16::try_from(spec.queue_entries_max - 1).unwrap_or(u16::MAX);
        let cap = Cap::new()
            .with_mqes_z(mqes_z)
            .with_cqr(true)
            .with_to(spec.timeout)
            .with_dstrd(spec.dstrd & 0xf)
            .with_css_nvm(true)
            .with_css_io_command_sets(true)
            .with_crwms(has_crto);
        self.registers.store64(u64::from(CAP), cap.into_bits());
        self.registers.store(u64::from(VS), spec.version.into_bits());
        let crto = if has_crto { Crto::new().with_crwmt(u16::from(spec.timeout)) } else { Crto::new() };
        self.registers.store(u64::from(CRTO), crto.into_bits());
        let csts = Csts::new()
            .with_rdy(
                matches!(self.enable_state, EnableState::Ready | EnableState::Disabling(_))
                    && !self.sqs.is_empty(),
            )
            .with_cfs(self.is_fatal)
            .with_shst(self.shst);
        let reads_ones = self.now < self.ones_until;
        self.registers.store(u64::from(CSTS), if reads_ones { u32::MAX } else { csts.into_bits() });
    }
}
