//! The request headers that make an answer one user's, unless the policy names others.

/// Headers that make a request one user's: what is answered to it is not for others.
///
/// A shared cache may store such answers only when they say so (RFC 9111, 3.5, for
/// `Authorization`); for the others no standard exists, so the request is not cached at all.
pub(crate) const CREDENTIAL_HEADERS: [&str; 41] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "x-api-key",
    "x-auth-token",
    "x-amz-security-token",
    // RFC 9421: a signature says which key made it.
    "signature",
    "signature-input",
    // RFC 9440: the certificate that a TLS terminating proxy has seen.
    "client-cert",
    "client-cert-chain",
    // oauth2-proxy: `--pass-user-headers`, `--pass-access-token`.
    "x-forwarded-user",
    "x-forwarded-email",
    "x-forwarded-preferred-username",
    "x-forwarded-groups",
    "x-forwarded-access-token",
    // oauth2-proxy behind nginx's `auth_request`: `--set-xauthrequest`.
    "x-auth-request-user",
    "x-auth-request-email",
    "x-auth-request-preferred-username",
    "x-auth-request-groups",
    "x-auth-request-access-token",
    // Cloudflare Access.
    "cf-access-jwt-assertion",
    "cf-access-authenticated-user-email",
    // Google's Identity-Aware Proxy.
    "x-goog-iap-jwt-assertion",
    "x-goog-authenticated-user-email",
    "x-goog-authenticated-user-id",
    // AWS Application Load Balancer.
    "x-amzn-oidc-data",
    "x-amzn-oidc-identity",
    "x-amzn-oidc-accesstoken",
    "x-amzn-mtls-clientcert",
    "x-amzn-mtls-clientcert-subject",
    // Azure App Service and Container Apps.
    "x-ms-client-principal",
    "x-ms-client-principal-id",
    "x-ms-client-principal-idp",
    "x-ms-client-principal-name",
    "x-ms-token-aad-access-token",
    "x-ms-token-aad-id-token",
    "x-ms-token-facebook-access-token",
    "x-ms-token-google-access-token",
    "x-ms-token-google-id-token",
    "x-ms-token-twitter-access-token",
    // Envoy.
    "x-forwarded-client-cert",
];
