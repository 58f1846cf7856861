//! What commands and features do: Commands Supported and Effects (log page 05h), Feature Identifiers
//! Supported and Effects (log page 12h).

use nvme_spec::log::{CommandEffect, CommandEffects};
use nvme_spec::opcode::{AdminOpcode, IoOpcode};
use nvme_spec::vendor::END_FORMER_ASSOCIATIONS;
use nvme_spec::zerocopy::IntoBytes;
use nvme_spec::zerocopy::little_endian::U32;

use super::{Kind, Window, feature};

/// Scope: the command or feature is about a namespace.
pub(super) const SCOPE_NAMESPACE: u16 = 1 << 0;
/// Scope: it is about the controller.
pub(super) const SCOPE_CONTROLLER: u16 = 1 << 1;

/// Admin commands of an I/O controller. None changes what another command sees; Set Features changes the
/// controller.
const ADMIN: [AdminOpcode; 8] = [
    AdminOpcode::GET_LOG_PAGE,
    AdminOpcode::IDENTIFY,
    AdminOpcode::ABORT,
    AdminOpcode::SET_FEATURES,
    AdminOpcode::GET_FEATURES,
    AdminOpcode::ASYNC_EVENT_REQUEST,
    AdminOpcode::KEEP_ALIVE,
    END_FORMER_ASSOCIATIONS,
];

/// I/O commands, and whether they change blocks.
const IO: [(IoOpcode, bool); 8] = [
    (IoOpcode::FLUSH, false),
    (IoOpcode::WRITE, true),
    (IoOpcode::READ, false),
    (IoOpcode::COMPARE, false),
    (IoOpcode::WRITE_ZEROES, true),
    (IoOpcode::DATASET_MANAGEMENT, true),
    (IoOpcode::VERIFY, false),
    (IoOpcode::COPY, true),
];

/// Log page 05h. The scope is left unreported: Linux takes any bit but CSUPP and LBCC of an I/O command for
/// an unusual effect, and warns.
pub(super) fn commands() -> CommandEffects {
    let mut log = CommandEffects::default();
    for opcode in ADMIN {
        log.set_admin(opcode, CommandEffect::new().with_supported(true));
    }
    for (opcode, changes_blocks) in IO {
        let effect = CommandEffect::new().with_supported(true).with_logical_block_content(changes_blocks);
        log.set_io(opcode, effect);
    }
    log
}

/// Log page 12h: a dword for each feature, with the bits of [`CommandEffect`].
pub(super) fn write_features(kind: Kind, window: &mut Window<'_>) {
    for feature in feature::all(kind) {
        let scope = if feature.is_namespace_specific() { SCOPE_NAMESPACE } else { SCOPE_CONTROLLER };
        let effect = CommandEffect::new().with_supported(true).with_scope(scope);
        window.put(u64::from(feature.id.0) * 4, U32::from(effect).as_bytes());
    }
}
