{{/* What everything is named after: two releases in one cluster differ in it. */}}
{{- define "predrain.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Of what stands outside the release's namespace. */}}
{{- define "predrain.clusterName" -}}
{{- $full := include "predrain.fullname" . -}}
{{- eq $full .Release.Namespace | ternary $full (printf "%s-%s" .Release.Namespace $full) -}}
{{- end -}}

{{/* What selects pods, together with the component. */}}
{{- define "predrain.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "predrain.labels" -}}
{{ include "predrain.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "predrain.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote -}}
{{- end -}}

{{/* The account that the controller runs under. */}}
{{- define "predrain.account" -}}
{{ include "predrain.fullname" . }}-{{ .Values.act.rights }}
{{- end -}}

{{- define "predrain.claim" -}}
{{ .Values.data.claim | default (printf "%s-data" (include "predrain.fullname" .)) }}
{{- end -}}

{{- define "predrain.tokens" -}}
{{ .Values.serve.tokensSecret | default (printf "%s-tokens" (include "predrain.fullname" .)) }}
{{- end -}}

{{/* Settings of the controller: the lease and the state are the release's own. */}}
{{- define "predrain.settings" -}}
{{- $full := include "predrain.fullname" . -}}
{{- $own := dict "namespace" .Release.Namespace "lease" (printf "%s-controller" $full) "state" (printf "%s-state" $full) "progress" (printf "%s-evacuations" $full) "probe_priority_class" (printf "%s-probe" (include "predrain.clusterName" .)) -}}
{{- if .Values.act.diagnosticJob }}{{ $own = set $own "diagnostic_job" "/etc/predrain/diagnostic-job.yaml" }}{{ end -}}
{{- toYaml (mergeOverwrite (dict "kubernetes" $own) (deepCopy .Values.act.settings)) -}}
{{- end -}}

{{/* Parameters of all jobs. The controller's thresholds are those of scoring too, so that a node has one tier. */}}
{{- define "predrain.params" -}}
{{- $policy := .Values.act.settings.policy | default dict -}}
{{- $own := dict -}}
{{- if and .Values.act.enabled $policy.thresholds -}}
{{- $own = dict "policy" (dict "thresholds" $policy.thresholds) -}}
{{- end -}}
{{- with mergeOverwrite (deepCopy $own) (deepCopy .Values.params) -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* Of every pod; given the chart's context as "top" and the component's values as "of". */}}
{{- define "predrain.pod" -}}
{{- $security := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 "seccompProfile" (dict "type" "RuntimeDefault") -}}
securityContext: {{- toYaml (mergeOverwrite $security (deepCopy (.of.securityContext | default dict))) | nindent 2 }}
{{- with .top.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector | default .top.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations | default .top.Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Of every container; the address of the registry, which may hold a password, is of those alone that read models. */}}
{{- define "predrain.container" -}}
image: {{ include "predrain.image" .top }}
imagePullPolicy: {{ .top.Values.image.pullPolicy }}
command: [predrain]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
resources: {{- toYaml .of.resources | nindent 2 }}
env:
  {{- if .env }}
  {{- toYaml .env | nindent 2 }}
  {{- else }}
  # Cache of compiled kernels: compiling takes half a minute.
  - name: NUMBA_CACHE_DIR
    value: {{ .cache | default "/data/.numba" }}
  {{- end }}
  {{- if or .registry (has .name (list "retrain" "score")) }}
  - name: MLFLOW_TRACKING_URI
    value: {{ .top.Values.registry | quote }}
  {{- end }}
  {{- with .top.Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The data and a place for temporary files. */}}
{{- define "predrain.volumes" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ include "predrain.claim" . }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- if include "predrain.params" . }}
- name: params
  configMap:
    name: {{ include "predrain.fullname" . }}-params
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "predrain.mounts" -}}
- name: data
  mountPath: /data
- name: tmp
  mountPath: /tmp
{{- if include "predrain.params" . }}
- name: params
  mountPath: /etc/predrain-params
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A job that runs on a schedule, one at a time: "top", "name", "of" (its values), "args", "deadline" in seconds. */}}
{{- define "predrain.cronJob" -}}
apiVersion: batch/v1
kind: CronJob
metadata:
  name: {{ include "predrain.fullname" .top }}-{{ .name }}
  namespace: {{ .top.Release.Namespace }}
  labels: {{- include "predrain.labels" .top | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  schedule: {{ .of.schedule | quote }}
  timeZone: Etc/UTC
  # Runs do not overlap. A run that cannot start in time is skipped; the next one does its work.
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 240
  successfulJobsHistoryLimit: 1
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      # No retries: the next run is the retry.
      backoffLimit: 0
      activeDeadlineSeconds: {{ .deadline }}
      ttlSecondsAfterFinished: 86400
      template:
        metadata:
          labels: {{- include "predrain.selector" .top | nindent 12 }}
            app.kubernetes.io/component: {{ .name }}
        spec:
          restartPolicy: Never
          automountServiceAccountToken: false
          {{- include "predrain.pod" . | nindent 10 }}
          containers:
            - name: {{ .name }}
              {{- include "predrain.container" . | nindent 14 }}
              args: {{- toYaml .args | nindent 16 }}
                {{- if include "predrain.params" .top }}
                - --params=/etc/predrain-params/params.yaml
                {{- end }}
              volumeMounts: {{- include "predrain.mounts" .top | nindent 16 }}
          volumes: {{- include "predrain.volumes" .top | nindent 12 }}
{{- end -}}
