"""Rules for identities: no keys, no sweeping roles, nobody from outside."""

from __future__ import annotations

from collections.abc import Iterator

from infra.policy.resource import Finding, Resource, Settings, finding, texts

KEY_TYPES = {
    "gcp:serviceaccount/key:Key": "a service account key is a password that never expires",
    "gcp:storage/hmacKey:HmacKey": "an HMAC key is a password that never expires",
}
BROAD_ROLES = {"roles/owner", "roles/editor"}
PROJECT_ROLES_TOO_WIDE = {
    "roles/storage.admin", "roles/storage.objectAdmin", "roles/iam.serviceAccountTokenCreator",
    "roles/iam.serviceAccountUser", "roles/iam.serviceAccountKeyAdmin",
}  # fmt: skip
"""Fine on one bucket or one account, too wide on a project."""
PROJECT_MEMBERS = ("gcp:projects/iAMMember:IAMMember", "gcp:organizations/iAMMember:IAMMember")
PUBLIC = {"allUsers", "allAuthenticatedUsers"}


def no_service_account_keys(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Workload identity and federation need none."""
    del settings
    reason = KEY_TYPES.get(resource.type)
    if reason is not None:
        yield finding(
            resource, "service-account-keys",
            message=f"{reason}, and its value would lie in the state",
            remedy="use workload identity (pods) or workload identity federation (outside)",
        )  # fmt: skip


def no_broad_roles(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """No owner or editor anywhere; on a project nothing that reaches every bucket or account."""
    del settings
    if "iam" not in resource.type.lower():
        return
    for role in texts(resource.get("role")):
        if role in BROAD_ROLES:
            yield finding(
                resource, "broad-roles",
                message=f"{role} can change everything, also these rules' results",
                remedy="grant the roles that the work needs (docs/infrastructure.md lists them)",
            )  # fmt: skip
        elif role in PROJECT_ROLES_TOO_WIDE and resource.type in PROJECT_MEMBERS:
            yield finding(
                resource, "broad-roles",
                message=f"{role} on a whole project reaches every bucket or service account in it",
                remedy="grant it on the one bucket or account that needs it",
            )  # fmt: skip


def no_policy_takeover(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """IAMPolicy and IAMBinding own the whole list: they remove what others, also Google's agents, were granted."""
    del settings
    last = resource.type.rsplit(":", 1)[-1]
    if resource.type.startswith("gcp:") and last.endswith(("IAMPolicy", "IAMBinding", "IamPolicy", "IamBinding")):
        yield finding(
            resource, "policy-takeover",
            message=f"{last} replaces every other grant, so that Google's own service agents lose theirs",
            remedy="use the IAMMember resource",
        )  # fmt: skip


def no_public_members(resource: Resource, settings: Settings) -> Iterator[Finding]:
    """Nothing is readable by everybody."""
    del settings
    for member in [*texts(resource.get("member")), *texts(resource.get("members"))]:
        if member in PUBLIC:
            yield finding(
                resource, "public-members",
                message=f"{member} is everybody on the internet",
                remedy="name the group, the account or the workload identity that needs it",
            )  # fmt: skip
