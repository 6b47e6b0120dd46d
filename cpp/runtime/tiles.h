// Permission to use the tile registers (AMX), which Linux gives to a process that asks.
#pragma once

namespace pelton {

// Asks for the whole process, threads to come included; asking again is harmless. Without it the
// first tile instruction ends the process. Throws Error, with the reason, if it is refused.
void request_tile_permission();

}  // namespace pelton
