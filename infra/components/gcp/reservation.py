"""Capacity that people have bought. A stack refers to it by full path; it makes one only when it is told to.

A reservation costs money from the moment it is made, used or not, and a delivered one cannot be given back: hence the
protection that no configuration takes off. Nothing is looked up here: a preview must not fail because a reservation
cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import compute

from infra.components.base import options
from spec.machines import machine
from spec.stack_region import Reservation
from spec.stack_values import parse_reservation


@dataclass(frozen=True, kw_only=True)
class ReservationRefArgs:
    """One reservation, as configured."""

    reservation: Reservation


class ReservationRef(pulumi.ComponentResource):
    """Stands for a reservation that exists, or makes it."""

    def __init__(self, name: str, args: ReservationRefArgs, *, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gkr:gcp:ReservationRef", name, None, opts)
        self.path = args.reservation.path
        self.made: list[pulumi.Resource] = [self._create(args.reservation)] if args.reservation.create else []
        self.register_outputs(
            {
                "path": self.path,
                "machine": args.reservation.machine,
                "nodes": args.reservation.nodes,
                "maintenance_interval": args.reservation.maintenance_interval,
            }
        )

    def _create(self, wanted: Reservation) -> compute.Reservation:
        path, row = parse_reservation(wanted.path), machine(wanted.machine)
        properties = compute.ReservationSpecificReservationInstancePropertiesArgs(
            machine_type=row.machine_type,
            # The machine type brings its GPUs' local SSDs; a list of our own that differs would never be matched.
            guest_accelerators=[
                compute.ReservationSpecificReservationInstancePropertiesGuestAcceleratorArgs(
                    accelerator_type=row.accelerator, accelerator_count=row.gpus
                )
            ],
            maintenance_interval=wanted.maintenance_interval,
        )
        return compute.Reservation(
            path.name,
            name=path.name,
            project=path.project,
            zone=wanted.zone,
            specific_reservation_required=True,
            specific_reservation=compute.ReservationSpecificReservationArgs(
                count=wanted.nodes, instance_properties=properties
            ),
            opts=options(self, kind="bought"),
        )
